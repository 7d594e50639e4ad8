"""Write what the ranks hold, and read it on any number of ranks, divided in any way.

`spurline_ranks.checkpoint` defines the format. Persistent buffers are saved beside the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest
from spurline.protocols.backend import Role
from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_fsdp_backend.trained_model import ShardedTrainedModel
from spurline_models.adapters.adapter_weights import AdapterStream
from spurline_models.optimizers.state import OptimizerState, describe
from spurline_models.placement.narrow_weights import base_dtype
from spurline_models.weight_files import WeightStream
from spurline_ranks.checkpoint import StoredModel
from spurline_ranks.pieces import held_pieces

Models = Mapping[Role, ShardedTrainedModel]


def save(
    path: Path, models: Models, layout: Mapping[str, int], read: Callable[[Tensor], Tensor]
) -> dict[str, FileDigest]:
    """Write this rank's part into the folder; return digests by path in it. Nothing is exchanged.

    Args:
        path: The folder.
        models: The trained models.
        layout: How the ranks are divided.
        read: Returns a tensor with the values of a model's or optimizer's tensor, which may be elsewhere.

    Raises:
        CheckpointWriteError: If it cannot be written.
    """
    rank = dist.get_rank()
    digests: dict[str, FileDigest] = {}
    for role, trained in models.items():
        state, weights = trained.optimization.state(), _model_tensors(trained)
        facts = {
            "updates": trained.updates,
            "initial_weights": trained.initial_weights,
            "frozen_weights": trained.frozen_weights,
            "weights": list(weights),
            "optimizer": state.facts(),
            "layout": dict(layout),
        }
        held = {name: read(tensor) for name, tensor in {**weights, **state.tensors}.items()}
        pieces = held_pieces(held, first=rank == 0)
        digests |= SavedModel.write(path / role, rank, facts if rank == 0 else None, pieces)
    return digests


class SavedModel(StoredModel):
    """A model in a checkpoint of this backend."""

    backend = "fsdp"

    def check(self, trained: ShardedTrainedModel) -> None:
        weights = {name: describe(value) for name, value in _model_tensors(trained).items()}
        self.check_fits(weights, trained.frozen_weights, trained.optimization.check)

    def put_into(self, trained: ShardedTrainedModel) -> None:
        with torch.no_grad():
            for name, target in _model_tensors(trained).items():
                self.index.fill(target, name)
        # The old state is freed before the new one is read.
        trained.optimization.optimizer.state.clear()
        stored = {
            key: self.index.read_like(key, trained.parameters[key.rpartition("/")[0]]) for key in self.optimizer_shapes
        }
        trained.optimization.restore(OptimizerState.read(stored, self.facts["optimizer"]))
        trained.updates = int(self.facts["updates"])
        trained.initial_weights = str(self.facts["initial_weights"])


def _model_tensors(trained: ShardedTrainedModel) -> dict[str, Tensor]:
    """Return trained weights, tied ones once, and persistent buffers, in the memory of the model."""
    buffers: dict[str, Tensor] = {}
    for prefix, module in trained.model.causal.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return {name: parameter.detach() for name, parameter in trained.parameters.items()} | buffers


def read_weights(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> WeightStream:
    """Read the policy in one process, without ranks. See `BackendFacts.checkpoint_reader`."""
    lora = cast(FsdpBackendConfig, run.backend).lora
    dtype = torch.float32 if lora is None else base_dtype(lora, run.model)
    return SavedModel.read_policy(run, folder, digests, lora, dtype)


def read_adapter(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> AdapterStream:
    """Read the adapter in one process, without ranks. See `BackendFacts.adapter_reader`."""
    lora = cast(FsdpBackendConfig, run.backend).lora
    assert lora is not None
    return SavedModel.read_adapter(run, folder, digests, lora)
