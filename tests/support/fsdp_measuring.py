"""A rank that returns the bytes it has allocated for weights, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline_fsdp_backend.rank import FsdpRank
from spurline_fsdp_backend.sharded_model import sharded_modules
from spurline_models.dealing import RankShare
from spurline_ranks.messages import read_objective


class MeasuringRank(FsdpRank):
    def allocated(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> dict[str, int]:
        """Bytes by part, measured where each is at its largest: gradients before the optimizer's step."""
        trained = self._policy
        self._accumulate("policy", RankShare.from_wire(wire), read_objective(objective, self._registry))
        gradients = [value.grad for value in trained.parameters.values()]
        parts = {"gradients": _bytes(value for value in gradients if value is not None)}
        trained.step(grad_norm=1.0)
        self._drop_gradients("policy")
        states = trained.optimization.optimizer.state.values()
        parts["optimizer"] = _bytes(value for state in states for value in state.values() if isinstance(value, Tensor))
        # On CPU they may lie in a mapped file, of whose storage a rank has touched no more than its share.
        parts["weights"] = sum(_local(value).nbytes for value in trained.model.causal.parameters())
        return parts

    def noted_forwards(self) -> int:
        """How many forward passes FSDP2 keeps in mind for a backward pass."""
        noted = 0
        for module in sharded_modules(self._policy.model.causal):
            state = module._get_fsdp_state()
            noted += len(state._comm_ctx.post_forward_order)
            if state._fsdp_param_group is not None:
                noted += len(state._fsdp_param_group._post_forward_indices)
        return noted

    def offloaded(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> bool:
        """Whether gradients are the same with the inputs of layers on the host."""
        before = self.gradients(wire, objective, "policy")
        self._policy.model.offload_activations()
        after = self.gradients(wire, objective, "policy")
        assert before is not None
        assert after is not None
        return all(np.array_equal(value, other) for (_, value), (_, other) in zip(before, after, strict=True))

    def peak(self, wire: Mapping[str, Any], objective: Mapping[str, Any]) -> int:
        """Bytes of GPU memory that one update holds at most."""
        torch.cuda.reset_peak_memory_stats()
        self.update(wire, objective, "policy")
        return torch.cuda.max_memory_allocated()


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages of what this rank has of these tensors, each counted once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage = _local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
