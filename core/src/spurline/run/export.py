"""Write a trained model as a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, GenerationConfig

from spurline.config.loading import LoadedConfig
from spurline.data.tokenizer import load_tokenizer
from spurline.errors import RunFailedError, UserError
from spurline.files import give_default_permissions
from spurline.model.weight_files import write_weight_files
from spurline.plugins.registry import resolve
from spurline.protocols.backend import Backend
from spurline.run.build import build_backend
from spurline.run.checkpoint import BACKEND, CheckpointStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_FILE_BYTES = 5 * 10**9
"""Of one weight file, as in the folders that transformers writes."""

_WriteWeights = Callable[[Path, torch.dtype, int], None]


def export_hf(
    backend: Backend, loaded: LoadedConfig, tokenizer: PreTrainedTokenizerBase, out: Path, *, replace: bool = False
) -> Path:
    """Write the backend's current weights, the model's config and the tokenizer into `out`.

    replace: overwrite what is there; otherwise `out` must be new or empty.
    Weights keep the dtype that the model's config names (fp32 when it names none).
    """
    if not replace:
        check_free(out)
    return _write_folder(backend.write_weights, loaded, tokenizer, out)


def _write_folder(
    write_weights: _WriteWeights, loaded: LoadedConfig, tokenizer: PreTrainedTokenizerBase, out: Path
) -> Path:
    model = loaded.config.model
    config = AutoConfig.from_pretrained(
        model.path, revision=model.revision, trust_remote_code=model.trust_remote_code, **model.config_overrides
    )
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    out = out.resolve()
    # Written beside and renamed: a folder that `from_pretrained` finds is whole.
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        write_weights(temporary, dtype, _MAX_FILE_BYTES)
        config.save_pretrained(temporary)
        _save_generation_config(loaded, tokenizer, temporary)
        tokenizer.save_pretrained(temporary)
        for file in temporary.iterdir():
            give_default_permissions(file)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    except OSError as error:
        raise RunFailedError(f"The model cannot be exported to {out}: {error}. Free some space.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def check_free(out: Path) -> None:
    """Raise UserError unless `out` is new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty. Choose another folder, or move it away.")


def _save_generation_config(loaded: LoadedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        _generation_config(loaded, tokenizer).save_pretrained(folder)
    except ValueError:
        # transformers loads settings that it refuses to save, such as a sampling number without sampling; what ends a
        # turn is all that a trained model must bring along.
        plain = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        plain.save_pretrained(folder)


def _generation_config(loaded: LoadedConfig, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The model's own settings, which also stop at the end-of-turn token that was trained."""
    model = loaded.config.model
    try:
        config = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main")
    except OSError:  # a model without a generation_config.json
        config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stops = dict.fromkeys(token for token in [*known, tokenizer.eos_token_id] if token is not None)
    config.eos_token_id = list(stops) if len(stops) > 1 else next(iter(stops), None)
    return config


def export_run(loaded: LoadedConfig, out: Path, checkpoint: str | Path | None = None) -> Path:
    """Export a checkpoint of a run: the given folder, or `best` or `latest` (the default) of the config's run_dir.

    The backend is not built where its config names a `checkpoint_reader`. Raises CheckpointError when there is no
    checkpoint or it is damaged.
    """
    check_free(out)
    config = loaded.config
    found = CheckpointStore(config.run_dir / "checkpoints", config.checkpoint.verify).chosen(checkpoint)
    if config.backend.checkpoint_reader is not None:
        read = resolve(config.backend.checkpoint_reader, f"checkpoint reader of backend '{config.backend.name}'")

        def write_weights(folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
            write_weight_files(
                folder, read(config, found.path / BACKEND, found.unverified(BACKEND)), dtype, max_file_bytes
            )

        return _write_folder(write_weights, loaded, load_tokenizer(config.model), out)
    with ExitStack() as stack:
        backend = build_backend(loaded, stack, total_updates=1)
        backend.load(found.path / BACKEND, found.unverified(BACKEND))
        return export_hf(backend, loaded, load_tokenizer(loaded.config.model), out)
