"""Find with the ranks of a run, for `spurline doctor`: the groups of FSDP, and how long weights and gradients travel.

The ranks are started without a model by `spurline_ranks.doctor`; a `FsdpDoctorRank` answers in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spurline.config.run_config import RunConfig
from spurline.errors import UserError
from spurline_fsdp_backend.memory import sent_bytes
from spurline_fsdp_backend.mesh import EXPERT, EXPERT_SHARD, REPLICA, SHARD, make_meshes
from spurline_models.machine import Finding
from spurline_ranks.doctor import ALL_TO_ALL, REDUCE, DoctorRank, Exchange, Group, examine
from spurline_ranks.group import Place

if TYPE_CHECKING:
    from spurline_fsdp_backend.configs import FsdpBackendConfig


def doctor(config: FsdpBackendConfig, run: RunConfig) -> Iterator[Finding]:
    """Start the ranks and yield what they find; see `RankBackendConfig.doctor`."""

    def follows(measured: Exchange) -> Iterator[Finding]:
        try:
            sent = sent_bytes(config, run)
        except UserError:
            # A model that cannot be read is a finding of its own, before the ranks are started.
            return
        yield Finding(
            "weights and gradients",
            f"{sent / 1e6:,.1f} MB from each rank for a micro-batch: an estimated {1e3 * sent / measured.rate:,.1f} ms "
            "at that rate, partly hidden by computing",
        )

    return examine(config, run, f"{__name__}:FsdpDoctorRank", follows)


class FsdpDoctorRank(DoctorRank):
    """A `Worker` without a model."""

    def groups(self, config: Any, place: Place) -> Mapping[str, Group]:
        meshes, kinds = make_meshes(config, place), (REDUCE, ALL_TO_ALL)
        groups: dict[str, Group] = {}
        if meshes.sharding.ndim == 2:
            groups |= {
                "ranks that hold one copy of the model": (meshes.sharding.get_group(SHARD), kinds),
                "ranks that hold the same part of the copies": (meshes.sharding.get_group(REPLICA), kinds),
            }
        groups["ranks that share sequences"] = (meshes.context, kinds)
        if meshes.experts is not None:
            groups |= {
                "ranks that divide the experts": (meshes.experts.get_group(EXPERT), kinds),
                "ranks that hold parts of the same experts": (meshes.experts.get_group(EXPERT_SHARD), kinds),
            }
        return groups
