"""Look for Megatron-core, and open its groups in real ranks without a model, for `spurline doctor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from spurline_megatron_backend.configs import INSTALL_CORE, has_megatron_core
from spurline_megatron_backend.grid import Grid, Place
from spurline_models.machine import Finding
from spurline_ranks.doctor import DoctorRank
from spurline_ranks.group import Place as RankPlace

Coordinates = Callable[[Place], tuple[int, ...]]
"""Returns the coordinates that all ranks of a group share."""

_GROUPS: Mapping[str, Coordinates] = {
    "ranks that divide layers": lambda at: (at.pipeline, at.data, at.context),
    "ranks that share sequences": lambda at: (at.pipeline, at.data, at.tensor),
    "ranks that hold the same weights": lambda at: (at.pipeline, at.tensor),
    "stages of the pipeline": lambda at: (at.tensor, at.context, at.data),
}
_OF_EXPERTS: Mapping[str, Coordinates] = {
    "ranks that divide the experts": lambda at: (at.pipeline, at.expert_data, at.expert_tensor),
    "ranks that divide each expert": lambda at: (at.pipeline, at.expert_data, at.expert),
    "ranks that hold the same experts": lambda at: (at.pipeline, at.expert, at.expert_tensor),
}


def look_for_core() -> Finding:
    """Find Megatron-core on this machine."""
    if not has_megatron_core():
        return Finding("layers", "megatron-core is not installed here", INSTALL_CORE)
    engine = "is installed here, and is not used" if find_spec("transformer_engine") else "is not here, nor needed"
    return Finding("layers", f"of megatron-core {version('megatron-core')}, in torch; TransformerEngine {engine}")


class MegatronDoctorRank(DoctorRank):
    """A `Worker` without a model."""

    libraries: ClassVar[tuple[str, ...]] = (*DoctorRank.libraries, "megatron-core")

    def groups(self, config: Any, place: RankPlace) -> Mapping[str, ProcessGroup | None]:
        # Without `ranks` the config counts GPUs, and a rank sees only one.
        grid = replace(config.grid, ranks=place.world)
        return {name: _own_group(members, place.rank) for name, members in groups_of(grid).items()}


def groups_of(grid: Grid) -> dict[str, list[list[int]]]:
    """Return the groups of more than one rank, by what they do."""
    wanted = {**_GROUPS, **(_OF_EXPERTS if grid.expert > 1 or grid.expert_tensor > 1 else {})}
    found = {name: _members(grid, common) for name, common in wanted.items()}
    return {name: members for name, members in found.items() if len(members[0]) > 1}


def _members(grid: Grid, common: Coordinates) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(grid.ranks):
        groups.setdefault(common(grid.place(rank)), []).append(rank)
    return list(groups.values())


def _own_group(members: Sequence[list[int]], rank: int) -> ProcessGroup:
    """Open all groups, and return the rank's own. A collective."""
    opened = [(dist.new_group(ranks), ranks) for ranks in members]
    return next(cast(ProcessGroup, group) for group, ranks in opened if rank in ranks)
