"""Start ranks, on this machine or on a cluster, and reserve what a run needs of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spurline.config.cluster import cluster_needs, cluster_request
from spurline.config.run_config import RunConfig
from spurline.ranks.cluster_checks import NodeChecks, prepare_nodes
from spurline.ranks.group import ANY_CLUSTER, ClusterRequest, RankGroup, RankRequest, TimeLimits
from spurline.ranks.machine import check_ray


def open_ranks(
    request: RankRequest,
    worker: str,
    arguments: tuple[Any, ...],
    limits: TimeLimits,
    on_nodes: NodeChecks | None = None,
    cluster: ClusterRequest = ANY_CLUSTER,
) -> RankGroup:
    """Processes that have joined each other and made their workers.

    worker: `module:Class`, a `spurline.ranks.group.Worker`; importing its module must be enough to have imported what
    is slow to import, and must not touch a GPU. arguments: of the class, after its place; plain data.
    on_nodes: is called on a cluster, where all machines can be asked, before any worker is made.
    cluster: which one.
    Raises what a rank raises meanwhile, ConfigError for a request that this machine cannot meet, and RankFailedError.
    """
    if request.launch == "ray":
        check_ray()
        from spurline.ranks.ray_actors import RayRanks

        return RayRanks(request, worker, arguments, limits, on_nodes, cluster)
    from spurline.ranks.processes import LocalRanks

    return LocalRanks(request, worker, arguments, limits)


@contextmanager
def room_on_cluster(run: RunConfig) -> Iterator[None]:
    """Room on the cluster for all that the run places there, where it places something: whoever starts actors in the
    context finds it reserved.

    Machines that are for engines alone have been checked. Raises ConfigError with the numbers where there is too
    little, where the machines are not alike, or do not share what they must; UserError for a cluster that cannot be
    joined.
    """
    needs = dict(cluster_needs(run))
    if not needs:
        yield
        return
    check_ray()
    from spurline.ranks.cluster_room import RunRoom

    room = RunRoom(cluster_request(run))
    try:
        room.reserve(needs, prepare_nodes(run))
        yield
    finally:
        room.close()
