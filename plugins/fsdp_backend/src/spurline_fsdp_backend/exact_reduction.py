"""Sum the gradients of FSDP2 over ranks and micro-batches exactly, so that neither division changes a bit.

After each backward pass of a group of parameters, every rank sends each other rank the values of that rank's shards,
in fp32, and adds what it receives to exact sums of its own shards. This sends as many bytes as FSDP2's reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter  # torch has no public name for it

from spurline_models.exact_sums import ExactSum


class ExactReduction(ReduceScatter):
    """The reduction of the parameters of one FSDP2 module.

    FSDP2 adds up the results of all micro-batches in `grad`. So the results are zeros, and at last the whole sum.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._module: Any = module
        self._sum = ExactSum()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(cast(Any, size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        self._reduce(received.view(group.size(), -1).unbind(), output_tensor)

    def of_one_rank(self, gradients: Tensor) -> None:
        """Replace the gradients in place. FSDP2 calls this instead if there is one rank."""
        self._reduce([gradients], gradients)

    def _reduce(self, parts: Sequence[Tensor], output: Tensor) -> None:
        for part in parts:
            self._sum.add(part)
        if self._module._get_fsdp_state()._state_ctx.is_last_backward:
            output.copy_(self._sum.total())
            self._sum = ExactSum()
        else:
            output.zero_()


def reduce_exactly(module: FSDPModule, num_ranks: int) -> None:
    """Let FSDP2 reduce the gradients of this module's own parameters exactly."""
    reduction = ExactReduction(module)
    if num_ranks > 1:
        module.set_custom_reduce_scatter(reduction)
    else:
        module.set_all_reduce_hook(reduction.of_one_rank)
