"""Write a trained model, or its adapter, as a Hugging Face folder that `from_pretrained` loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import RunFailedError, UserError
from spurline.files import remove
from spurline.plugins.registry import resolve
from spurline.protocols.backend import Backend
from spurline.run.build import build_backend
from spurline.run.checkpoints.checkpoint import BACKEND, Checkpoint, CheckpointStore
from spurline_models.abilities import TrainsAdapters
from spurline_models.adapters.adapter_weights import AdapterStream, write_adapter_files
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.backend_config import adapters_of
from spurline_models.weight_files import write_weight_files
from spurline_text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_FILE_BYTES = 5 * 10**9


def export_model(
    backend: Backend,
    loaded: LoadedConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    replace: bool = False,
    adapter: bool = False,
) -> Path:
    """Write the backend's current weights, the model's config and the tokenizer into the folder `out`.

    Weights get the dtype that the model's config names. With `replace`, existing content of `out` is replaced. With
    `adapter`, only the adapter, its settings and the tokenizer are written.

    Raises:
        UserError: If `out` has content, or if `adapter` is set and the run has no adapter that others can load.
    """
    if not replace:
        check_free(out)
    if not adapter:
        return _write_model(backend.write_weights, loaded.config.model, tokenizer, out)
    check_adapter(loaded.config)
    settings = backend.adapter_settings() if isinstance(backend, TrainsAdapters) else None
    if not isinstance(backend, TrainsAdapters) or settings is None:
        raise UserError(
            f"Backend '{loaded.config.backend.name}' cannot separate its adapters from the base weights. Export the "
            "whole model, in which they are merged."
        )
    return _write_adapter(AdapterStream(settings, backend.named_adapter_weights()), tokenizer, out)


def check_adapter(config: RunConfig) -> None:
    """Raise UserError unless the run trains an adapter, and other programs can load the model that it adapts."""
    whole = "Export the whole model: `spurline export RUN_DIR OUT`, without --adapter."
    if adapters_of(config) is None:
        raise UserError(f"This run has no adapter: it trains all weights, since backend.lora is not set. {whole}")
    if config.model.head == "score":
        raise UserError(f"The folder of an adapter has no place for the score head (model.head: score). {whole}")
    if config.model.init == "random":
        raise UserError(f"The adapter of this run belongs to random weights (model.init: random). {whole}")


def _write_adapter(adapter: AdapterStream, tokenizer: PreTrainedTokenizerBase, out: Path) -> Path:
    def fill(folder: Path) -> None:
        write_adapter_files(folder, adapter)
        tokenizer.save_pretrained(folder)

    return _write_beside(out, "adapter", fill)


def _write_model(
    write_weights: Callable[[Path, torch.dtype, int], None],
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
) -> Path:
    config, dtype = _config_and_dtype(model)
    text = config.get_text_config()
    if model.head == "score":
        # transformers scores a text at its last token that is no padding, which must be its end token. Without a token
        # for padding, it refuses batches of several texts.
        ids: tuple[Any, ...] = (text.pad_token_id, tokenizer.pad_token_id)
        known = [int(token) for token in ids if token is not None]
        text.pad_token_id = next((token for token in known if not _may_end_text(token, model, tokenizer)), None)

    def fill(folder: Path) -> None:
        write_weights(folder, dtype, _MAX_FILE_BYTES)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if model.head == "score":
            return
        try:
            generation_config(model, tokenizer).save_pretrained(folder)
        except ValueError:
            # transformers refuses to save some settings that it has loaded. If so, save only the special tokens.
            plain = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
            plain.save_pretrained(folder)

    return _write_beside(out, "model", fill)


def _may_end_text(token: int, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the token is a stop token, or one that the chat template writes."""
    stops = generation_config(model, tokenizer).eos_token_id
    is_stop = token in (stops if isinstance(stops, list) else [stops])
    return is_stop or str(tokenizer.convert_ids_to_tokens(token)) in str(tokenizer.chat_template or "")


def _config_and_dtype(model: ModelConfig) -> tuple[PretrainedConfig, torch.dtype]:
    config = AutoConfig.from_pretrained(
        model.path, revision=model.revision, trust_remote_code=model.trust_remote_code, **model.config_overrides
    )
    if model.head == "score":
        config.num_labels = 1
        config.architectures = [type(build_without_memory(load_model_config(model), model)).__name__]
    return config, config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _write_beside(out: Path, what: str, fill: Callable[[Path], None]) -> Path:
    """Fill a new folder beside `out`, then rename it to `out`, so that `out` is never incomplete."""
    # If `out` is a link to a folder with content, replace the link and keep the folder. Follow any other link.
    is_full = out.is_dir() and any(out.iterdir())
    out = out.parent.resolve() / out.name if is_full else out.resolve()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        # Some libraries create files with fewer permissions.
        permissions = temporary.stat().st_mode & 0o666
        for file in temporary.iterdir():
            file.chmod(permissions)
        remove(out)
        temporary.rename(out)
    except OSError as error:
        raise RunFailedError(f"The {what} cannot be exported to {out}: {error}. Free some space.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def check_free(out: Path) -> None:
    """Raise UserError unless `out` is new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty. Choose another folder, or move it away.")


def generation_config(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return the model's generation settings, with the tokenizer's end token added to the stop tokens."""
    try:
        config = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main")
    except OSError:  # a model without a generation_config.json
        config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stops = dict.fromkeys(token for token in [*known, tokenizer.eos_token_id] if token is not None)
    config.eos_token_id = list(stops) if len(stops) > 1 else next(iter(stops), None)
    return config


def exported_weights(loaded: LoadedConfig, found: Checkpoint) -> dict[str, Tensor]:
    """Return the weights that `export_run` would write, on the host."""
    _, dtype = _config_and_dtype(loaded.config.model)
    with ExitStack() as stack:
        reader = loaded.config.backend.facts.checkpoint_reader
        if reader is None:
            tensors = _backend_of(loaded, found, stack).named_weights()
        else:
            tensors = _read(reader, loaded.config, found).tensors
        return {
            # Copy, since a closed backend frees its tensors, and tensors of files are memory-mapped.
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            for name, tensor in tensors
        }


def export_run(loaded: LoadedConfig, out: Path, checkpoint: str | Path | None = None, *, adapter: bool = False) -> Path:
    """Export a checkpoint to `out`, which must be new or an empty folder. `adapter` is as in `export_model`.

    `checkpoint` is a checkpoint folder, `best` or `latest`; None means `latest`. The backend is started only if it has
    no `checkpoint_reader`, or no `adapter_reader` for an adapter.

    Raises:
        CheckpointError: If there is no checkpoint, or it is damaged.
    """
    check_free(out)
    config = loaded.config
    if adapter:
        check_adapter(config)
    found = CheckpointStore(config.run_dir / "checkpoints").chosen(checkpoint)
    tokenizer = load_tokenizer(config.model)
    reader = config.backend.facts.adapter_reader if adapter else config.backend.facts.checkpoint_reader
    if reader is None:
        with ExitStack() as stack:
            return export_model(_backend_of(loaded, found, stack), loaded, tokenizer, out, adapter=adapter)
    content = _read(reader, config, found)
    if adapter:
        return _write_adapter(content, tokenizer, out)
    return _write_model(
        lambda folder, dtype, most: write_weight_files(folder, content, dtype, most), config.model, tokenizer, out
    )


def _backend_of(loaded: LoadedConfig, found: Checkpoint, stack: ExitStack) -> Backend:
    backend = build_backend(loaded, stack, total_updates=1)
    backend.load(found.path / BACKEND, found.unverified(BACKEND))
    return backend


def _read(reader: str, config: RunConfig, found: Checkpoint) -> Any:
    read = resolve(reader, f"checkpoint reader of backend '{config.backend.name}'")
    return read(config, found.path / BACKEND, found.unverified(BACKEND))
