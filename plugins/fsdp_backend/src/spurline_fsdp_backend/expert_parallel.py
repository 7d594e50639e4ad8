"""Divide the experts of a mixture-of-experts model over ranks: tokens travel to their experts, and results come back.

Place on the way: a model on the meta device -> its experts on a mesh of their own -> FSDP2 over all else. Ranks hold
whole experts, so that nothing of them is gathered where there is one copy. This is the one module that uses
transformers' plans for experts.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from spurline.errors import ModelError

_DISPATCHES = "ep_dispatch_experts"
"""The style of a module whose tokens travel."""


def divide_experts(causal: PreTrainedModel, experts: DeviceMesh, alone: DeviceMesh, path: str) -> list[nn.Module]:
    """Give each rank of a group its part of all experts; returns the modules that hold them.

    experts: the ranks of one group. alone: a mesh of this rank, as no two ranks have the same tokens.
    path: of the model, for errors. Raises ModelError for a model whose experts cannot be divided so.
    """
    plan = causal._expand_parallel_plan(dict(causal.ep_plan or {}))
    holders = {name: causal.get_submodule(name) for name, style in plan.items() if style == _DISPATCHES}
    if not holders:
        raise ModelError(
            f"{path}: backend.expert is {experts.size()}, and transformers knows no experts to divide in "
            f"{type(causal).__name__}. Set backend.expert to 1, which divides its weights like any others."
        )
    for name, holder in holders.items():
        count = int(holder.num_experts)  # type: ignore[arg-type]
        if count % experts.size():
            fitting = [str(number) for number in range(1, count + 1) if count % number == 0]
            raise ModelError(
                f"{path}: backend.expert is {experts.size()}, which does not divide the {count} experts of {name}. "
                f"Numbers that do: {', '.join(fitting)}."
            )
    # Not `auto`: that may reduce over the group in evaluation, where it takes equal batches of all its ranks.
    apply_expert_parallelism(causal, experts, alone, plan, ep_implementation="all_to_all")
    return list(holders.values())
