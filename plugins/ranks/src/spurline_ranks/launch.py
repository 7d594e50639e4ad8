"""Start ranks, on this machine or on a cluster."""

from __future__ import annotations

from typing import Any

from spurline.protocols.ranks import RankRequest
from spurline_models.machine import check_ray
from spurline_ranks.group import ClusterRequest, RankGroup, TimeLimits


def open_ranks(
    request: RankRequest,
    worker: str,
    arguments: tuple[Any, ...],
    limits: TimeLimits,
    cluster: ClusterRequest | None = None,
) -> RankGroup:
    """Start processes that have joined each other and made their workers.

    Args:
        request: How many ranks, and where.
        worker: `module:Class`, a `spurline_ranks.group.Worker`. Its module imports what is slow to import, and does not
            touch a GPU.
        arguments: Of the class, after its place; plain data.
        limits: Of the start and of calls.
        cluster: The cluster, with `launch: ray`; None for the one that Ray finds.

    Raises:
        SpurlineError: What a rank raises meanwhile.
        ConfigError: If this machine cannot meet the request.
    """
    if request.launch == "ray":
        check_ray()
        from spurline_ranks.ray_actors import RayRanks

        return RayRanks(request, worker, arguments, limits, cluster or ClusterRequest())
    from spurline_ranks.processes import LocalRanks

    return LocalRanks(request, worker, arguments, limits)
