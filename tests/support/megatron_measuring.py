"""A rank that returns the bytes it has allocated for weights, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spurline_megatron_backend.open_rank import open_rank
from spurline_models.dealing import RankShare
from spurline_ranks.group import Place
from spurline_ranks.messages import read_objective

if TYPE_CHECKING:
    from spurline_megatron_backend.rank import MegatronRank


class MeasuringRank:
    """A rank of the backend with measurements. A `Worker`."""

    def __init__(self, place: Place, plain_run: Mapping[str, Any], total_updates: int) -> None:
        self._rank: MegatronRank = open_rank(place, plain_run, total_updates)

    def build(self) -> None:
        self._rank.build()

    def _accumulate(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> None:
        read = read_objective(objective, self._rank._registry)
        self._rank._accumulate("policy", RankShare.from_wire(wire), read)

    def allocated(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> dict[str, int]:
        """Return the bytes of each part after an optimizer step."""
        trained = self._rank._policy
        self._accumulate(wire, objective)
        trained.step(grad_norm=1.0)
        weights = _storages(parameter for _, parameter in trained.model.parameters())
        wrapped: list[Any] = trained._wrapped
        buffers = [buffer for part in wrapped for buffer in (*part.buffers, *part.expert_parallel_buffers)]
        states = [
            value for state in trained.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
        # With fp32 weights the copies are the weights. A view keeps its whole storage.
        copies = _storages(shard.main for shard in trained.shards).items()
        return {
            "weights": sum(weights.values()),
            "gradients": sum(_storages(buffer.grad_data for buffer in buffers).values()),
            "optimizer": sum(_storages(states).values()) + sum(size for at, size in copies if at not in weights),
        }

    def kept(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> int:
        """Bytes that the forward pass of one micro-batch keeps for its backward pass, weights not counted."""
        trained = self._rank._policy
        weights = _storages(parameter for _, parameter in trained.model.parameters())
        kept: dict[int, int] = {}
        goes_back = False

        def keep(tensor: Tensor) -> Tensor:
            # Recomputation keeps tensors of one layer at a time.
            if not goes_back:
                kept.update(_storages([tensor]))
            return tensor

        def give(tensor: Tensor) -> Tensor:
            nonlocal goes_back
            goes_back = True
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            self._accumulate(wire, objective)
        return sum(size for at, size in kept.items() if at not in weights)

    def operators(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> list[str]:
        """Return the names of all operators of one update."""
        with torch.profiler.profile() as profile:
            self._rank.update(wire, objective, "policy")
        return sorted({event.key for event in profile.key_averages()})

    def peak(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> int:
        """Return the peak of GPU memory in one update, in bytes."""
        torch.cuda.reset_peak_memory_stats()
        self._rank.update(wire, objective, "policy")
        return torch.cuda.max_memory_allocated()


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages of these tensors, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
