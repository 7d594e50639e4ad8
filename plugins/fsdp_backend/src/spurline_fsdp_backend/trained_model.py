"""A sharded model with its optimizer.

Place on the way: gradients of this rank's shards -> norm and loss of all ranks -> clipping -> optimizer -> shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from spurline_fsdp_backend.sharded_model import model_tensors, weights_digest
from spurline_models.optimizers.optimization import OptimizationRecipe
from spurline_models.placement.offloading import DeviceTensors, tensors_in
from spurline_models.streams.stream_model import StreamModel
from spurline_ranks.pieces import held_values
from spurline_ranks.worker import StepTotals, clip_factor


class ShardedTrainedModel:
    """A model with the optimizer of its parameters that require gradients. Making one is a collective."""

    def __init__(self, model: StreamModel, recipe: OptimizationRecipe) -> None:
        self.model = model
        self.parameters: Mapping[str, Parameter] = {
            name: value for name, value in model.causal.named_parameters() if value.requires_grad
        }
        self.initial_weights = weights_digest(model.causal)
        """The digest of the weights that the run started from, also after a resume."""
        self.frozen_weights = weights_digest(model.causal, frozen=True)
        """The digest of the frozen weights, which checkpoints do not hold."""
        self.updates = 0
        self.optimization = recipe(self.parameters)

    def totals(self, loss: float) -> StepTotals:
        """Join norm and loss of all ranks; see `StepTotals.of`. A collective."""
        squares = torch.zeros((), dtype=torch.float64, device=self.model.causal.device)
        for value in self.parameters.values():
            if value.grad is not None:
                local = held_values(value.grad)
                squares += local.to(squares.device).double().pow(2).sum() / _copies(value)
        return StepTotals.of(squares, loss)

    def step(self, grad_norm: float) -> dict[str, float]:
        """Clip, and update the weights; return the learning rates as metrics."""
        factor = clip_factor(grad_norm, self.optimization.max_grad_norm)
        if factor is not None:
            for value in self.parameters.values():
                if value.grad is not None:
                    # Shards are scaled one by one: expert groups have other meshes.
                    held_values(value.grad).mul_(factor)
        rates = self.optimization.step(self.updates + 1)
        self.updates += 1
        return rates

    def tensors(self) -> DeviceTensors:
        """Return what lies on the device between two updates."""
        return DeviceTensors(model_tensors(self.model.causal), list(tensors_in(self.optimization.optimizer.state)))


def _copies(value: Tensor) -> int:
    """Return the number of ranks that hold each value of this parameter."""
    world = dist.get_world_size()
    if not isinstance(value, DTensor):
        return world
    mesh = value.device_mesh
    # `is_shard` is False for experts, which are sharded twice in one dimension.
    parts = math.prod(mesh.size(place) for place, kind in enumerate(value.placements) if not kind.is_replicate())
    return world // parts
