"""Find with the ranks of a run, for `spurline doctor`: every group of the grid, and what Megatron-core has here.

The ranks are started without a model by `spurline_ranks.doctor`; a `MegatronDoctorRank` answers in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch.distributed as dist

from spurline.config.run_config import RunConfig
from spurline_megatron_backend.configs import INSTALL_CORE, has_megatron_core
from spurline_megatron_backend.grid import Grid, Place
from spurline_models.machine import Finding
from spurline_ranks.doctor import ALL_TO_ALL, NEXT, REDUCE, DoctorRank, Group, examine
from spurline_ranks.group import Place as RankPlace

if TYPE_CHECKING:
    from spurline_megatron_backend.configs import MegatronBackendConfig

Coordinates = Callable[[Place], tuple[int, ...]]
"""Coordinates that all ranks of a group have in common."""

_JOINT = (REDUCE, ALL_TO_ALL)

_GROUPS: Mapping[str, tuple[Coordinates, Sequence[str]]] = {
    "ranks that divide layers": (lambda at: (at.pipeline, at.data, at.context), _JOINT),
    "ranks that share sequences": (lambda at: (at.pipeline, at.data, at.tensor), _JOINT),
    "ranks that hold the same weights": (lambda at: (at.pipeline, at.tensor), _JOINT),
    "stages of the pipeline": (lambda at: (at.tensor, at.context, at.data), (NEXT,)),
}

_OF_EXPERTS: Mapping[str, tuple[Coordinates, Sequence[str]]] = {
    "ranks that divide the experts": (lambda at: (at.pipeline, at.expert_data, at.expert_tensor), _JOINT),
    "ranks that divide each expert": (lambda at: (at.pipeline, at.expert_data, at.expert), _JOINT),
    "ranks that hold the same experts": (lambda at: (at.pipeline, at.expert, at.expert_tensor), _JOINT),
}


def doctor(config: MegatronBackendConfig, run: RunConfig) -> Iterator[Finding]:
    """Start the ranks and yield what they find; see `RankBackendConfig.doctor`."""
    if has_megatron_core():
        # A fact, and no fault: it is not needed, and not used where it is there.
        engine = "is installed here, and is not used" if find_spec("transformer_engine") else "is not here, nor needed"
        yield Finding("layers", f"of megatron-core {_version()}, in torch; TransformerEngine {engine}")
    else:
        yield Finding("layers", "megatron-core is not installed here", INSTALL_CORE)
        # The machines of a cluster have packages of their own.
        if config.launch != "ray":
            return
    yield from examine(config, run, f"{__name__}:MegatronDoctorRank")


def _version() -> str:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return "without a version, from the import path"


class MegatronDoctorRank(DoctorRank):
    """A `Worker` without a model."""

    libraries: ClassVar[tuple[str, ...]] = (*DoctorRank.libraries, "megatron-core")

    def groups(self, config: Any, place: RankPlace) -> Mapping[str, Group]:
        # The config counts GPUs where it is not told how many ranks there are, and a rank sees one.
        grid = replace(config.grid, ranks=place.world)
        return {name: (_own_group(members, place.rank), kinds) for name, (members, kinds) in groups_of(grid).items()}


def groups_of(grid: Grid) -> dict[str, tuple[list[list[int]], Sequence[str]]]:
    """Return the groups of more than one rank: by what they do, the ranks of each and their kinds of exchange."""
    wanted = {**_GROUPS, **(_OF_EXPERTS if grid.expert > 1 or grid.expert_tensor > 1 else {})}
    found = {name: (_members(grid, common), kinds) for name, (common, kinds) in wanted.items()}
    return {name: (members, kinds) for name, (members, kinds) in found.items() if len(members[0]) > 1}


def _members(grid: Grid, common: Coordinates) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(grid.ranks):
        groups.setdefault(common(grid.place(rank)), []).append(rank)
    return list(groups.values())


def _own_group(members: Sequence[list[int]], rank: int) -> dist.ProcessGroup:
    """A collective: all ranks open all groups."""
    opened = [(dist.new_group(ranks), ranks) for ranks in members]
    return next(cast(dist.ProcessGroup, group) for group, ranks in opened if rank in ranks)
