"""Open the process groups of ranks that shard weights, share sequences and divide experts.

Neighbouring ranks share a sequence. Ranks are numbered machine by machine, so neighbours share a machine if possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_ranks.doctor import DoctorRank
from spurline_ranks.group import Place

REPLICA, SHARD, DATA, CONTEXT = "replica", "shard", "data", "context"
EXPERT_SHARD, EXPERT, RANK, ALONE = "expert_shard", "expert", "rank", "alone"
"""Names of mesh dimensions."""


@dataclass(frozen=True)
class Meshes:
    """The groups that this rank is in.

    Attributes:
        sharding: The ranks that shard parameters. If `replicas` is above 1, the mesh has two dimensions: first
            the replicas, then the ranks that shard one replica.
        context: The ranks that share the sequences of this rank. None if each rank has its own sequences.
        experts: A mesh of two dimensions: first the ranks that hold parts of the same experts, then the ranks among
            which all experts are divided. None if experts are not divided.
        alone: A mesh that has only this rank. None if experts are not divided.
    """

    sharding: DeviceMesh
    context: ProcessGroup | None
    experts: DeviceMesh | None
    alone: DeviceMesh | None


def make_meshes(config: FsdpBackendConfig, place: Place) -> Meshes:
    """Open the groups. This is a collective."""
    device, context = config.on, config.context
    if config.replicas > 1:
        shape, names = (config.replicas, place.world // config.replicas), (REPLICA, SHARD)
    else:
        shape, names = (place.world,), (SHARD,)
    group = None
    if context > 1:
        sequences = init_device_mesh(device, (place.world // context, context), mesh_dim_names=(DATA, CONTEXT))
        group = sequences[CONTEXT].get_group()
    experts = alone = None
    if config.expert > 1:
        divided = (place.world // config.expert, config.expert)
        experts = init_device_mesh(device, divided, mesh_dim_names=(EXPERT_SHARD, EXPERT))
        alone = init_device_mesh(device, (place.world, 1), mesh_dim_names=(RANK, ALONE))[ALONE]
    sharding = init_device_mesh(device, shape, mesh_dim_names=names)
    return Meshes(sharding, group, experts, alone)


class FsdpDoctorRank(DoctorRank):
    """A rank of `spurline doctor`, without a model."""

    def groups(self, config: Any, place: Place) -> Mapping[str, ProcessGroup | None]:
        meshes = make_meshes(config, place)
        groups: dict[str, ProcessGroup | None] = {"ranks that share sequences": meshes.context}
        if meshes.sharding.ndim == 2:
            groups |= {
                "ranks that hold one copy of the model": meshes.sharding.get_group(SHARD),
                "ranks that hold the same part of each copy": meshes.sharding.get_group(REPLICA),
            }
        if meshes.experts is not None:
            groups |= {
                "ranks that divide the experts": meshes.experts.get_group(EXPERT),
                "ranks that hold parts of the same experts": meshes.experts.get_group(EXPERT_SHARD),
            }
        return groups
