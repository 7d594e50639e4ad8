"""Write and read everything the local backend needs to continue bit for bit.

model.safetensors: trainable weights (of a LoRA run the adapters only: the others still are what `model.path` gives,
and are recognised by a digest) and the model's persistent buffers. optimizer.safetensors: what the optimizer keeps of
each parameter. rng.safetensors and state.json: the random generators, the update count, that digest, the one of the
weights the run started from, and the optimizer's name and numbers. No pickle. Naming, renaming into place and pruning
are the caller's work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spurline.errors import CheckpointError, CheckpointWriteError
from spurline.model import device_profile
from spurline.optimizers.state import OptimizerState, describe

if TYPE_CHECKING:
    from spurline.backends.local.trained_model import TrainedModel

_FORMAT = 2


def save_training_state(path: Path, trained: TrainedModel) -> None:
    """Write into this folder. Raises CheckpointWriteError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        optimizer = trained.optimization.state()
        generators = device_profile.generator_tensors()
        for name, tensors in (
            ("model", _model_tensors(trained)),
            ("optimizer", optimizer.tensors),
            ("rng", generators),
        ):
            save_file(_separate(tensors), path / f"{name}.safetensors")
        content = {
            "format": _FORMAT,
            "updates": trained.updates,
            "frozen_weights": trained.frozen_weights,
            "initial_weights": trained.initial_weights,
            "optimizer": optimizer.facts(),
            "generators": device_profile.generator_values(),
        }
        (path / "state.json").write_text(json.dumps(content), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointWriteError(str(error)) from error


@dataclass(frozen=True)
class SavedState:
    """What a folder holds, read and found to fit; nothing has been changed by it yet.

    initial_weights: None in checkpoints that were written without it.
    """

    updates: int
    initial_weights: str | None
    model: Mapping[str, Tensor]
    optimizer: OptimizerState
    generator_tensors: dict[str, Tensor]
    generator_values: dict[str, Any]

    def put_into(self, trained: TrainedModel) -> None:
        """Make the model, its optimizer and the random generators what they were."""
        with torch.no_grad():
            for name, target in _model_tensors(trained).items():
                target.copy_(self.model[name])
        trained.optimization.restore(self.optimizer)
        trained.updates = self.updates
        if self.initial_weights is not None:
            trained.initial_weights = self.initial_weights
        device_profile.restore_generator_tensors(self.generator_tensors)
        device_profile.restore_generator_values(self.generator_values)


def read_training_state(path: Path, trained: TrainedModel) -> SavedState:
    """Read what was saved. Raises CheckpointError unless all of it fits this model and optimizer."""
    model, optimizer, generators = (_read(path / f"{name}.safetensors") for name in ("model", "optimizer", "rng"))
    content = _read_json(path / "state.json")
    _check_model(path, model, _model_tensors(trained))
    if content["frozen_weights"] != trained.frozen_weights:
        raise CheckpointError(
            f"{path}: the checkpoint's adapters were trained on other frozen weights than this run's model has. Resume "
            "with the model.path, model.revision, model.init and seed the checkpoint was made with."
        )
    state = OptimizerState.read(optimizer, content.get("optimizer"))
    try:
        trained.optimization.check(state)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return SavedState(
        int(content["updates"]), content.get("initial_weights"), model, state, generators, content["generators"]
    )


def _model_tensors(trained: TrainedModel) -> dict[str, Tensor]:
    """Trainable weights, tied ones once, and persistent buffers: the very tensors of the model."""
    causal = trained.model.causal
    persistent = causal.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in causal.named_buffers() if name in persistent}
    return {name: parameter.detach() for name, parameter in trained.parameters.items()} | buffers


def _check_model(path: Path, saved: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    missing, foreign = sorted(targets.keys() - saved.keys()), sorted(saved.keys() - targets.keys())
    if missing or foreign:
        raise CheckpointError(
            f"{path}: the checkpoint holds other weights than this run trains: {_some('missing', missing)}"
            f"{_some('not in the model', foreign)}Resume with the model and backend.lora the checkpoint was made with."
        )
    for name, target in targets.items():
        if saved[name].shape != target.shape or saved[name].dtype != target.dtype:
            raise CheckpointError(
                f"{path}: {name} is {describe(saved[name])} in the checkpoint, but {describe(target)} in this run. "
                "Resume with the model, backend.lora and backend.precision the checkpoint was made with."
            )


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, with a copy for each that has its values in common with another one."""
    places: set[int] = set()
    whole: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        value = tensor.contiguous()
        whole[key] = value.clone() if value.data_ptr() in places else value
        places.add(value.data_ptr())
    return whole


def _some(label: str, names: list[str]) -> str:
    return f"{len(names)} {label} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). " if names else ""


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_unreadable(path, error)) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(_unreadable(path, error)) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path}: not a state of this Spurline version (format {_FORMAT}). Use the one that wrote it."
        )
    return content


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path}: missing or damaged ({error}). Resume from another checkpoint."
