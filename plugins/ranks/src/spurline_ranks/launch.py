"""Start ranks, on this machine or on a cluster."""

from __future__ import annotations

from typing import Any

from spurline.protocols.ranks import RankRequest
from spurline_models.machine import check_ray
from spurline_ranks.cluster_checks import NodeChecks
from spurline_ranks.group import ANY_CLUSTER, ClusterRequest, RankGroup, TimeLimits


def open_ranks(
    request: RankRequest,
    worker: str,
    arguments: tuple[Any, ...],
    limits: TimeLimits,
    on_nodes: NodeChecks | None = None,
    cluster: ClusterRequest = ANY_CLUSTER,
) -> RankGroup:
    """Processes that have joined each other and made their workers.

    worker: `module:Class`, a `spurline_ranks.group.Worker`; importing its module must be enough to have imported
    what is slow to import, and must not touch a GPU. arguments: of the class, after its place; plain data.
    on_nodes: is called on a cluster, where all machines can be asked, before any worker is made.
    cluster: which one.
    Raises what a rank raises meanwhile, ConfigError for a request that this machine cannot meet, and RankFailedError.
    """
    if request.launch == "ray":
        check_ray()
        from spurline_ranks.ray_actors import RayRanks

        return RayRanks(request, worker, arguments, limits, on_nodes, cluster)
    from spurline_ranks.processes import LocalRanks

    return LocalRanks(request, worker, arguments, limits)
