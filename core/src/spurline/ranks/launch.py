"""Start ranks, on this machine or on a cluster."""

from __future__ import annotations

from typing import Any

from spurline.ranks.group import RankGroup, RankRequest, TimeLimits


def open_ranks(request: RankRequest, worker: str, arguments: tuple[Any, ...], limits: TimeLimits) -> RankGroup:
    """Processes that have joined each other and made their workers.

    worker: `module:Class`, a `spurline.ranks.group.Worker`; importing its module must be enough to have imported what
    is slow to import, and must not touch a GPU. arguments: of the class, after its place; plain data.
    Raises what a rank raises meanwhile, ConfigError for a request that this machine cannot meet, and RankFailedError.
    """
    if request.launch == "ray":
        from spurline.ranks.ray_actors import RayRanks

        return RayRanks(request, worker, arguments, limits)
    from spurline.ranks.processes import LocalRanks

    return LocalRanks(request, worker, arguments, limits)
