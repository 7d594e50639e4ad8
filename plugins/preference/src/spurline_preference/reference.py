"""Keep log-probabilities of the reference model for all answers of a run, and read them in later runs.

Data flow: answers of a source -> `backend.logprobs` before the first step -> a file -> column `reference_logprobs` of
the batches. A file is named by everything that its values depend on: the weights, the settings of the model and the
backend, and the tokens. It is written beside and renamed into place, so readers see a whole file or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.data.batch import TrainingBatch
from spurline.files import write_bytes, write_errors
from spurline.protocols.backend import Backend, Role
from spurline.protocols.source import SourceContext
from spurline_models.architecture import load_model_config, model_of
from spurline_models.weight_files import safetensors_files
from spurline_text.sources.sft import values_of_segments

FOLDER = "reference_logprobs"
"""Name of the folder of the files, in the folder of the token cache, or in the run directory if there is no cache."""
_BLOCK_BYTES = 1 << 24


def places_of_tokens(batch: TrainingBatch, starts: NDArray[np.int64]) -> Tensor:
    """Return the place of each token in a flat array of tokens, int64 [R, L], or -1 for padding.

    `starts` has the place of the first token of each segment, in the order of the batch's segments.
    """
    first = values_of_segments(batch, starts, of_padding=-1)
    return torch.where(first >= 0, first + batch.tokens["position_ids"].long(), -1)


class ReferenceLogprobs:
    """Log-probabilities of the reference model for a flat array of tokens."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._values = torch.from_numpy(values)

    def column(self, places: Tensor) -> Tensor:
        """Return the values at these places, float32 [R, L], and 0 at places of -1."""
        return torch.where(places >= 0, self._values[places.clamp(min=0)], 0.0)

    @classmethod
    def load(cls, path: Path, size: int) -> ReferenceLogprobs | None:
        """Return the stored values, or None if there is no file that holds `size` values."""
        try:
            values = np.fromfile(path, np.float32)
        except FileNotFoundError:
            return None
        return cls(values) if len(values) == size else None

    @classmethod
    def compute(
        cls, batches: Iterable[tuple[TrainingBatch, Tensor]], size: int, backend: Backend, role: Role, path: Path
    ) -> ReferenceLogprobs:
        """Compute the values of all tokens in these batches and their places, and store them.

        Raises:
            RunFailedError: If the file cannot be written.
        """
        values = np.zeros(size, np.float32)
        for batch, places in batches:
            found = backend.logprobs(batch, role)
            known = batch.drop_padding_rows(places)
            values[known[known >= 0].numpy()] = found[known >= 0].numpy()
            batch.release()
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, values.data)
        return cls(values)


def file_of(context: SourceContext, tokens: str) -> Path:
    """Return the path of the values for tokens with this fingerprint.

    Raises:
        ModelError: If the model's files cannot be read.
    """
    run = context.config
    key = xxhash.xxh3_128_hexdigest(f"{_digest_of_model(run)} {_settings_of_backend(run)} {tokens}".encode())
    return (run.tokenization.cache_folder or Path(run.run_dir)) / FOLDER / f"{key}.f32"


def _digest_of_model(run: RunConfig) -> str:
    """Return a digest of the reference model's weights and config."""
    model = model_of(run.model, "reference")
    settings = json.loads(load_model_config(model).to_json_string(use_diff=False))
    # Neither the folder nor the version of the library changes a value.
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    digest = xxhash.xxh3_128(json.dumps(settings).encode())
    if model.init == "random":
        digest.update(str(run.seed).encode())
        return digest.hexdigest()
    for path in safetensors_files(model):
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _settings_of_backend(run: RunConfig) -> str:
    """Return the settings on which the values depend by more than rounding."""
    fields = type(run.backend).model_fields.items()
    unused = {name for name, field in fields if {OnResume.FREE, OnResume.TO_ROUNDING} & {*field.metadata}}
    return json.dumps([run.backend.facts.computes_in, run.backend.model_dump(mode="json", exclude=unused)])
