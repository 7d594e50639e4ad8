"""Open the model that answers: a checkpoint of a run, or a folder or name of a model.

The weights of a checkpoint are read in place, as `spurline export` would write them, so that what answers here is what
an export would answer: adapters merged, rounded to the dtype of the files, the tokenizer with the run's chat template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import ModelConfig
from spurline.errors import UserError
from spurline.progress import Progress
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.directory import RunDirectory
from spurline_models.architecture import load_model_config
from spurline_models.device_profile import device_profile
from spurline_models.export import exported_weights, generation_config
from spurline_models.generation import stop_tokens
from spurline_models.loading import load_model
from spurline_models.streams.positions import position_limit
from spurline_text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; `temperature` 0 takes the likeliest token, `top_k` 0 any, `stop` texts end an answer."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, is_wrong, words in (
            ("--max-new-tokens", self.max_new_tokens < 1, "at least 1"),
            ("--temperature", not 0 <= self.temperature < math.inf, "0, which takes the likeliest token, or more"),
            ("--top-p", not 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("--top-k", self.top_k < 0, "0, for all tokens, or more"),
            ("--stop", "" in self.stop, "a text with at least one character"),
        ):
            if is_wrong:
                raise UserError(f"{option} must be {words}.")

    def words(self) -> str:
        """Describe it for people."""
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        cuts = [f"top_p {self.top_p:g}"] * (self.top_p < 1) + [f"top_k {self.top_k}"] * (self.top_k > 0)
        return ", ".join([how, *(cuts if self.temperature else ()), f"at most {self.max_new_tokens:,} new tokens"])


@dataclass(frozen=True)
class Target:
    """A model that answers.

    Attributes:
        words: A description for people.
        causal: The model.
        tokenizer: Its tokenizer.
        sampling: How it usually answers.
        stops: Tokens that end an answer.
        context: Tokens that it can see; None without a limit.
        columns: Columns of its training data, see `DatasetConfig.columns`.
    """

    words: str
    causal: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    stops: tuple[int, ...]
    context: int | None
    columns: Mapping[str, str] = field(default_factory=dict[str, str])


def is_run(target: Path) -> bool:
    """Return whether a folder is a run's; models have a config.json too."""
    try:
        config: Any = json.loads((target / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, Mapping) and "run_dir" in config


def open_run(loaded: LoadedConfig, checkpoint: str, progress: Progress) -> Target:
    """Open a checkpoint of a run: `latest`, `best`, or a folder. Raises CheckpointError if there is none."""
    directory = RunDirectory(loaded.config.run_dir)
    store = CheckpointStore(directory.checkpoints)
    found = store.chosen(None if checkpoint == "latest" else checkpoint)
    target = _open(loaded.config.model, progress, lambda: exported_weights(loaded, found), str(found.path))
    own = loaded.config.source.facts.sampling
    return replace(
        target,
        words=f"{directory.path}, step {found.step:,}",
        columns=loaded.config.data.train[0].columns,
        sampling=target.sampling
        if own is None
        else Sampling(own.max_new_tokens, own.temperature, own.top_p, own.top_k, own.stop),
    )


def open_model(path: str, progress: Progress) -> Target:
    """Open a folder of a model, or its name on the hub. Raises ModelError."""
    return _open(ModelConfig(path=path), progress)


def _open(
    model: ModelConfig, progress: Progress, read: Callable[[], dict[str, Tensor]] | None = None, where: str = ""
) -> Target:
    """Open a model, with the weights that `read` gives from `where` instead of its own."""
    progress("loading the tokenizer")
    tokenizer = load_tokenizer(model)
    progress(f"loading weights{' of ' if where else ''}{where}")
    weights = None if read is None else read()
    causal = load_model(model, device_profile(setting="device"), seed=0, weights=weights).eval()
    if read is not None:
        causal.generation_config = generation_config(model, tokenizer)
    limit = position_limit(load_model_config(model))
    stops = tuple(stop_tokens(causal, model))
    context = None if limit is None else limit.tokens
    return Target(model.path, causal, tokenizer, _usual(causal.generation_config), stops, context)


def _usual(config: GenerationConfig | None) -> Sampling:
    """Return the sampling that the model's files recommend."""
    if config is None or not config.do_sample:
        return Sampling()
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
    )
