"""Start ranks, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spurline.ranks.cluster_checks import AskNodes
from spurline.ranks.group import RankGroup, RankRequest, TimeLimits
from spurline.ranks.machine import check_ray


def open_ranks(
    request: RankRequest,
    worker: str,
    arguments: tuple[Any, ...],
    limits: TimeLimits,
    on_nodes: Callable[[AskNodes], None] | None = None,
) -> RankGroup:
    """Processes that have joined each other and made their workers.

    worker: `module:Class`, a `spurline.ranks.group.Worker`; importing its module must be enough to have imported what
    is slow to import, and must not touch a GPU. arguments: of the class, after its place; plain data.
    on_nodes: is called on a cluster, where all machines can be asked, before any worker is made.
    Raises what a rank raises meanwhile, ConfigError for a request that this machine cannot meet, and RankFailedError.
    """
    if request.launch == "ray":
        check_ray()
        from spurline.ranks.ray_actors import RayRanks

        return RayRanks(request, worker, arguments, limits, on_nodes)
    from spurline.ranks.processes import LocalRanks

    return LocalRanks(request, worker, arguments, limits)
