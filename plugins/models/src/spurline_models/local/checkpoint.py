"""Write and read everything the local backend needs to continue bit for bit, without pickle.

- model.safetensors: the trained weights or their fp32 masters, and the model's persistent buffers.
- optimizer.safetensors: the optimizer's state of each parameter.
- rng.safetensors: the random generators.
- state.json: the update count, the optimizer's name and numbers, a digest of the frozen weights, and digests of the
  weights that the run started from and of untrained models. The frozen weights themselves are not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.digests import FileDigest
from spurline.errors import CheckpointError, CheckpointWriteError, RunFailedError
from spurline.tensor_files import write_tensor_file
from spurline_models import device_profile
from spurline_models.adapters.adapter_weights import AdapterStream
from spurline_models.device_profile import DeviceProfile
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.optimizers.state import OptimizerState, describe
from spurline_models.placement.narrow_weights import base_dtype
from spurline_models.saved_weights import (
    SavedTensors,
    check_frozen,
    check_weights,
    damaged,
    read_facts,
    saved_adapter,
    saved_weights,
    write_facts,
)
from spurline_models.weight_files import WeightStream, layout_of, values_of_tensor
from spurline_models.weights import PinnedWeights

if TYPE_CHECKING:
    from spurline_models.local.trained_model import TrainedModel

_FORMAT = 2


class HostCopies:
    """Copies of tensors in host memory. A checkpoint is written from the copies while training continues.

    The memory is allocated once, and reused for later copies.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies by name. The next call for `group` overwrites them. Raises RunFailedError if out of memory."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get((group, name))
            if buffer is None or describe(buffer) != describe(tensor):
                try:
                    buffer = self._buffers[group, name] = self._profile.pinned_exactly(tensor.shape, tensor.dtype)
                except (RuntimeError, OSError) as error:
                    raise RunFailedError(
                        f"The copy of {name} ({tensor.nbytes:,} bytes) that a checkpoint is written from does not fit "
                        f"into the host's memory ({error}). Set checkpoint.async: false, which copies nothing."
                    ) from error
            copies[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        self._profile.synchronize()
        return copies


@dataclass(frozen=True)
class TrainingState:
    """The saved state of one model: tensors by file and name, and the facts in `state.json`."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, trained: TrainedModel, read: Callable[[Tensor], Tensor]) -> TrainingState:
        """Return the current state. Its tensors are not copies, so later training changes them.

        `read` returns a tensor itself, or its copy on the host while engines use the tensor's memory.

        Raises:
            CheckpointWriteError: If the optimizer's state cannot be saved in a checkpoint.
        """
        optimizer = trained.optimization.state()
        own = {"model": _model_tensors(trained), "optimizer": optimizer.tensors}
        held = {file: {name: read(tensor) for name, tensor in tensors.items()} for file, tensors in own.items()}
        facts = {
            "format": _FORMAT,
            "updates": trained.updates,
            "frozen_weights": trained.frozen_weights,
            "narrow_weights": trained.narrow_names,
            **trained.pinned.facts(),
            "optimizer": optimizer.facts(),
            "generators": device_profile.generator_values(),
        }
        # `generator_tensors` returns copies.
        return cls(held | {"rng": device_profile.generator_tensors()}, facts)

    def copied(self, copies: HostCopies, owner: str) -> TrainingState:
        """Return this state with its tensors copied into `copies`. Each model needs its own `owner`."""
        held = {file: copies.take(f"{owner}/{file}", tensors) for file, tensors in self.tensors.items()}
        return TrainingState(held, self.facts)

    def write(self, path: Path) -> dict[str, FileDigest]:
        """Write the state into this folder, and return the files' digests by name. Raises CheckpointWriteError."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            digests: dict[str, FileDigest] = {}
            for file, tensors in self.tensors.items():
                values = {name: values_of_tensor(tensor) for name, tensor in tensors.items()}
                digests[f"{file}.safetensors"] = write_tensor_file(path / f"{file}.safetensors", values, {})
            return digests | write_facts(path, self.facts)
        except OSError as error:
            raise CheckpointWriteError(str(error)) from error


def read_weights(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> WeightStream:
    """Read the policy's weights from a checkpoint, one by one. See `BackendFacts.checkpoint_reader`."""
    config = cast(LocalBackendConfig, run.backend)
    return saved_weights(_saved_tensors(config, run.model, folder), run.model, config.lora, run.seed)


def read_adapter(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> AdapterStream:
    """Read the policy's adapter from a checkpoint. See `BackendFacts.adapter_reader`."""
    config = cast(LocalBackendConfig, run.backend)
    assert config.lora is not None
    return saved_adapter(_saved_tensors(config, run.model, folder), run.model, config.lora, run.seed)


def _saved_tensors(config: LocalBackendConfig, model: ModelConfig, folder: Path) -> SavedTensors:
    facts = read_facts(folder, "local", _FORMAT)
    path = folder / "model.safetensors"
    try:
        file = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from error
    narrow = frozenset(facts["narrow_weights"])

    def read(name: str) -> Tensor:
        tensor = file.get_tensor(name)
        # The optimizer updates fp32 masters of these weights, and the model computes with their rounded values.
        return tensor.to(torch.bfloat16).to(torch.float32) if name in narrow else tensor

    return SavedTensors(
        folder,
        layout_of(path),
        read,
        facts["frozen_weights"],
        torch.float64 if config.computes_in == "fp64" else torch.float32,
        torch.float32 if config.lora is None else base_dtype(config.lora, model),
        config.lora is not None and config.lora.is_quantized,
        narrow,
    )


def read_training_state(path: Path, trained: TrainedModel) -> Callable[[], None]:
    """Read a saved state, and return a function that puts it into the model, its optimizer and the random generators.

    Raises:
        CheckpointError: If the state does not fit this model and optimizer. Then nothing has been changed.
    """
    content = read_facts(path, "local", _FORMAT)
    model, optimizer, generators = (_read(path / f"{name}.safetensors") for name in ("model", "optimizer", "rng"))
    check_weights(path, _described(model), _described(_model_tensors(trained)))
    check_frozen(path, content["frozen_weights"], trained.frozen_weights)
    state = OptimizerState.read(optimizer, content["optimizer"])
    try:
        trained.optimization.check(state)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error

    def put() -> None:
        with torch.no_grad():
            for name, target in _model_tensors(trained).items():
                target.copy_(model[name])
        trained.publish()
        trained.optimization.restore(state)
        trained.updates = int(content["updates"])
        trained.pinned = PinnedWeights.read(content)
        device_profile.restore_generators(generators, content["generators"])

    return put


def _model_tensors(trained: TrainedModel) -> dict[str, Tensor]:
    """Return the trained weights or their masters, and the persistent buffers. A tied weight appears once."""
    causal = trained.model.causal
    persistent = causal.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in causal.named_buffers() if name in persistent}
    return trained.values | buffers


def _described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: describe(tensor) for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from error
