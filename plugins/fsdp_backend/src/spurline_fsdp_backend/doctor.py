"""Open the groups of FSDP in real ranks without a model, for `spurline doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from spurline.config.run_config import RunConfig
from spurline_fsdp_backend.mesh import EXPERT, EXPERT_SHARD, REPLICA, SHARD, make_meshes
from spurline_models.machine import Finding
from spurline_ranks.doctor import DoctorRank, examine
from spurline_ranks.group import Place

if TYPE_CHECKING:
    from spurline_fsdp_backend.configs import FsdpBackendConfig


def doctor(config: FsdpBackendConfig, run: RunConfig) -> Iterator[Finding]:
    """Start the ranks and yield what they find; see `RankBackendConfig.doctor`."""
    return examine(config, run, f"{__name__}:FsdpDoctorRank")


class FsdpDoctorRank(DoctorRank):
    """A `Worker` without a model."""

    def groups(self, config: Any, place: Place) -> Mapping[str, ProcessGroup | None]:
        meshes = make_meshes(config, place)
        groups: dict[str, ProcessGroup | None] = {"ranks that share sequences": meshes.context}
        if meshes.sharding.ndim == 2:
            groups |= {
                "ranks that hold one copy of the model": meshes.sharding.get_group(SHARD),
                "ranks that hold the same part of the copies": meshes.sharding.get_group(REPLICA),
            }
        if meshes.experts is not None:
            groups |= {
                "ranks that divide the experts": meshes.experts.get_group(EXPERT),
                "ranks that hold parts of the same experts": meshes.experts.get_group(EXPERT_SHARD),
            }
        return groups
