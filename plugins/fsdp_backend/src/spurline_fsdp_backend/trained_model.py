"""A sharded model with its optimizer, and its checkpoints.

Data flow: gradients of this rank's shards -> norm and loss of all ranks -> clipping -> optimizer -> shards. A
checkpoint holds the trained weights, the persistent buffers and the optimizer's state, in the format of
`spurline_ranks.checkpoint`. Any number of ranks can read it, with any division of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest
from spurline.protocols.backend import Role
from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_fsdp_backend.sharded_model import model_tensors, weights_digest
from spurline_models.accumulate import Number
from spurline_models.adapters.adapter_weights import AdapterStream
from spurline_models.exact_sums import largest_of, norm_of, sum_of_squares
from spurline_models.optimizers.optimization import OptimizationRecipe
from spurline_models.optimizers.state import OptimizerState, describe
from spurline_models.placement.narrow_weights import base_dtype
from spurline_models.placement.offloading import DeviceTensors, tensors_in
from spurline_models.saved_weights import saved_adapter, saved_weights
from spurline_models.streams.stream_model import StreamModel
from spurline_models.weight_files import WeightStream
from spurline_models.weights import PinnedWeights
from spurline_ranks.checkpoint import StoredModel
from spurline_ranks.pieces import held_pieces, held_values
from spurline_ranks.worker import StepTotals, clip_factor


class ShardedTrainedModel:
    """A model with the optimizer of its trainable parameters. The constructor is a collective."""

    def __init__(self, model: StreamModel, recipe: OptimizationRecipe, *, reproducible: bool) -> None:
        self.model = model
        self._is_reproducible = reproducible
        self.parameters: Mapping[str, Parameter] = {
            name: value for name, value in model.causal.named_parameters() if value.requires_grad
        }
        self.pinned = PinnedWeights(weights_digest(model.causal))
        self.frozen_weights = weights_digest(model.causal, frozen=True)
        """The digest of the frozen weights, which are not in checkpoints."""
        self.updates = 0
        self.optimization = recipe(self.parameters, reproducible=reproducible)

    def totals(self, loss: Number) -> StepTotals:
        """Combine the gradient norm and the loss of all ranks. See `StepTotals.of`. This is a collective."""
        # This sums in float64 without a copy of the gradients in float64.
        gradients = self._gradients()
        if self._is_reproducible:
            return _exact_totals(gradients, loss, self.model.causal.device)
        if not gradients:
            return StepTotals.of(torch.zeros((), dtype=torch.float64, device=self.model.causal.device), loss)
        norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float64))  # pyright: ignore
        copies = [_copies(value) for value in self.parameters.values() if value.grad is not None]
        squares = (norms.square() / norms.new_tensor(copies)).sum()
        return StepTotals.of(squares.to(self.model.causal.device), loss)

    def step(self, grad_norm: float) -> dict[str, float]:
        """Clip gradients and update the weights; return the learning rates as metrics."""
        factor = clip_factor(grad_norm, self.optimization.max_grad_norm)
        if factor is not None:
            # torch's own clipping cannot scale parameters of several meshes together.
            torch._foreach_mul_(self._gradients(), factor)  # pyright: ignore
        rates = self.optimization.step(self.updates + 1)
        self.updates += 1
        return rates

    def _gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients that exist."""
        return [held_values(value.grad) for value in self.parameters.values() if value.grad is not None]

    def tensors(self) -> DeviceTensors:
        """Return the tensors that are on the device between two updates."""
        return DeviceTensors(model_tensors(self.model.causal), list(tensors_in(self.optimization.optimizer.state)))


def _exact_totals(gradients: Sequence[Tensor], loss: Number, device: torch.device) -> StepTotals:
    """Return totals that do not depend on how ranks divide gradients and micro-batches."""
    largest = torch.tensor(largest_of(gradients), dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (sum_of_squares(gradients, float(largest)), loss))
    squares, losses = zip(*parts, strict=True)
    return StepTotals(norm_of(sum(squares), float(largest)), float(sum(losses)))


def _copies(value: Tensor) -> int:
    """Return how many ranks hold each value of this parameter."""
    world = dist.get_world_size()
    if not isinstance(value, DTensor):
        return world
    mesh = value.device_mesh
    # `is_shard` does not work here: it is False for experts, which are sharded twice in one dimension.
    parts = math.prod(mesh.size(place) for place, kind in enumerate(value.placements) if not kind.is_replicate())
    return world // parts


def save(
    path: Path, models: Mapping[Role, ShardedTrainedModel], layout: Mapping[str, int], read: Callable[[Tensor], Tensor]
) -> dict[str, FileDigest]:
    """Write this rank's part into the folder, and return the digests of the written files. Ranks exchange nothing.

    Args:
        path: The folder. Each model gets a subfolder.
        models: The trained models.
        layout: The sizes of the groups of ranks, by name.
        read: A function that returns the values of a tensor of the model or optimizer. While engines have the
            device, the values are copies on the host.

    Raises:
        CheckpointWriteError: If the part cannot be written.
    """
    rank = dist.get_rank()
    digests: dict[str, FileDigest] = {}
    for role, trained in models.items():
        state, weights = trained.optimization.state(), _model_tensors(trained)
        facts = {
            "updates": trained.updates,
            **trained.pinned.facts(),
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
        # Free the old state before reading the new state.
        trained.optimization.optimizer.state.clear()
        stored = {
            key: self.index.read_like(key, trained.parameters[key.rpartition("/")[0]]) for key in self.optimizer_shapes
        }
        trained.optimization.restore(OptimizerState.read(stored, self.facts["optimizer"]))


def _model_tensors(trained: ShardedTrainedModel) -> dict[str, Tensor]:
    """Return trained weights and persistent buffers by name, as views of the model. Tied weights appear once."""
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
    return saved_weights(SavedModel.read_saved(folder, digests, dtype), run.model, lora, run.seed)


def read_adapter(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> AdapterStream:
    """Read the adapter in one process, without ranks. See `BackendFacts.adapter_reader`."""
    lora = cast(FsdpBackendConfig, run.backend).lora
    assert lora is not None
    # The dtype of the frozen weights does not matter here, as adapters are in fp32.
    return saved_adapter(SavedModel.read_saved(folder, digests, torch.float32), run.model, lora, run.seed)
