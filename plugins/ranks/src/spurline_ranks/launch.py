"""Start ranks, on this machine or on a cluster."""

from __future__ import annotations

from typing import Any

from spurline.protocols.ranks import RankRequest
from spurline_models.machine import check_ray
from spurline_ranks.calls import RankGroup
from spurline_ranks.group import ClusterRequest, TimeLimits


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
        worker: `module:Class` of the worker in every rank, made with torch's default process group ready. Its methods
            are called one at a time, in the same order on all ranks. Its module imports all that is slow to import,
            and does not touch a GPU.
        arguments: Plain data for the class, after its `Place`.
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
