"""Divide the experts of a mixture-of-experts model over ranks: tokens travel to their experts, and results come back.

Place on the way: a model on the meta device -> its experts on a mesh of their own -> FSDP2 over all else. Ranks hold
whole experts, so that nothing of them is gathered where there is one copy. This is the one module that uses
transformers' plans for experts.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from spurline.errors import ModelError
from spurline_fsdp_backend.mesh import EXPERT, Meshes

_DISPATCHES = "ep_dispatch_experts"
"""The style of a module whose tokens travel."""


def divide_experts(causal: PreTrainedModel, meshes: Meshes) -> list[nn.Module]:
    """Give each rank of a group its part of all experts; returns the modules that hold them.

    Raises ModelError for a model whose experts cannot be divided so.
    """
    assert meshes.experts is not None
    assert meshes.alone is not None
    group, path = meshes.experts[EXPERT], causal.config.name_or_path
    plan = causal._expand_parallel_plan(dict(causal.ep_plan or {}))
    holders = [causal.get_submodule(name) for name, style in plan.items() if style == _DISPATCHES]
    if not holders:
        raise ModelError(
            f"backend.expert is {group.size()}, and transformers knows no experts to divide in {path}, a "
            f"{type(causal).__name__}. Set it to 1, which shards its weights like all others."
        )
    # Not `auto`, which in evaluation sums over the group and takes the batches of its ranks to be equal. No two ranks
    # have the same tokens, so each is alone with its batch.
    apply_expert_parallelism(causal, group, meshes.alone, plan, ep_implementation="all_to_all")
    return holders
