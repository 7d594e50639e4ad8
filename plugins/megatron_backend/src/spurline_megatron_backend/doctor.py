"""Look for Megatron-core, and open the groups of ranks without a model, for `spurline doctor`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar, cast

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from spurline_megatron_backend.configs import INSTALL_CORE, has_megatron_core
from spurline_megatron_backend.grid import Grid
from spurline_models.machine import Finding
from spurline_ranks.doctor import DoctorRank
from spurline_ranks.group import Place


def look_for_core() -> Finding:
    """Report whether Megatron-core is installed on this machine."""
    if not has_megatron_core():
        return Finding("layers", "megatron-core is not installed here", INSTALL_CORE)
    engine = "is installed, but not used" if find_spec("transformer_engine") else "is not installed, and not needed"
    return Finding("layers", f"layers of megatron-core {version('megatron-core')}; TransformerEngine {engine}")


class MegatronDoctorRank(DoctorRank):
    """A rank of `spurline doctor`, without a model."""

    libraries: ClassVar[tuple[str, ...]] = (*DoctorRank.libraries, "megatron-core")

    def groups(self, config: Any, place: Place) -> Mapping[str, ProcessGroup | None]:
        # If `ranks` is not set, the config counts the visible GPUs. But a rank sees only its own GPU.
        groups = groups_of(replace(config.grid, ranks=place.world))
        return {
            name: cast(ProcessGroup, dist.new_subgroups_by_enumeration(members)[0]) for name, members in groups.items()
        }


def groups_of(grid: Grid) -> dict[str, list[list[int]]]:
    """Map each purpose to the groups of ranks that serve it. Groups of a single rank are left out."""
    numbers = np.arange(grid.ranks)
    # The order of the axes is the order in which `Grid.place` numbers ranks.
    ranks = numbers.reshape(grid.pipeline, grid.data, grid.context, grid.tensor)
    by_expert = numbers.reshape(grid.pipeline, grid.expert_data, grid.expert, grid.expert_tensor)
    groups = {
        "ranks that divide layers": _along(ranks, 3),
        "ranks that share sequences": _along(ranks, 2),
        "ranks that hold the same weights": _along(ranks, 1, 2),
        "stages of the pipeline": _along(ranks, 0),
    }
    if grid.expert > 1 or grid.expert_tensor > 1:
        groups |= {
            "ranks that divide the experts": _along(by_expert, 2),
            "ranks that divide each expert": _along(by_expert, 3),
            "ranks that hold the same experts": _along(by_expert, 1),
        }
    return {name: members for name, members in groups.items() if len(members[0]) > 1}


def _along(ranks: NDArray[np.int64], *axes: int) -> list[list[int]]:
    """Return the groups of ranks that differ only along these axes."""
    size = math.prod(ranks.shape[axis] for axis in axes)
    return np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, size).tolist()
