"""Bring whole tensors together out of the ranks' shards; what they become is `spurline_ranks.weight_gathering`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from spurline_ranks.weight_gathering import cast


class ShardGathering:
    """`Gathers` of a sharded model: FSDP2 makes a tensor whole on all ranks, which keep what they want.

    read: gives the tensor that has the values of one of the model's own, where these may be elsewhere.
    """

    def __init__(self, causal: PreTrainedModel, read: Callable[[Tensor], Tensor]) -> None:
        self._causal, self._read = causal, read

    def gather(self, wanted: Mapping[int, Sequence[str]], dtype: torch.dtype | None) -> dict[str, Tensor]:
        # Asked for each time: what a forward pass has gathered is given back by this.
        state = self._causal.state_dict(keep_vars=True)
        mine = set(wanted.get(dist.get_rank(), ()))
        whole: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for names in wanted.values() for name in names):
            tensor = gather(cast(self._read(state[name].detach()), dtype))
            if name in mine:
                whole[name] = tensor
        return whole

    def owner_of(self, names: Sequence[str]) -> int:
        """Return the first rank: all have an equal part, and all are sent the others'."""
        return 0


def gather(value: Tensor) -> Tensor:
    """Return the whole tensor. A collective for a shard."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gather_gradients(parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return (name, whole gradient) of each parameter, on every rank. A collective."""
    return [
        (name, gather(torch.zeros_like(value) if value.grad is None else value.grad).detach())
        for name, value in parameters.items()
    ]
