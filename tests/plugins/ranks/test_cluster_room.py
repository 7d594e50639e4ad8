"""Room for a whole run on a cluster of three machines with GPUs that only Ray believes in: all of it, or numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from ray_clusters import CPUS, GPUS, add_machine, two_machines
from run_helpers import wait_for

from spurline.errors import ConfigError, RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_ranks.group import ClusterNeed, ClusterRequest, TimeLimits, open_ranks

pytest.importorskip("ray")
from spurline_ranks.cluster_room import Place, reserved_room, room_for
from spurline_ranks.ray_cluster import Node, RayCluster

pytestmark = pytest.mark.processes
AT_ONCE = ClusterRequest(room_timeout_s=0.0)
RANKS = RankRequest(2 * GPUS, "cuda", "ray", per_node=GPUS)
"""They fill two of the machines."""

Reserve = Callable[..., Callable[..., Any]]


def engines(count: int, gpus: int) -> ClusterNeed:
    return ClusterNeed("engines", count, gpus, 1, gpus_if_any=True)


def need_of(request: RankRequest) -> ClusterNeed:
    need = ClusterNeed.of_ranks(request)
    assert need is not None
    return need


@pytest.fixture(scope="module")
def joined() -> Iterator[RayCluster]:
    """Three machines, of which the third goes away after the tests of this file."""
    cluster = two_machines()
    third = add_machine(cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        joined = RayCluster(ClusterRequest())
        joined.open()
        wait_for(lambda: len(joined.nodes()) == 3, "three machines", 30)
        yield joined
        joined.close()
    cluster.remove_node(third)


@pytest.fixture
def reserve(joined: RayCluster) -> Iterator[Reserve]:
    """Reserves room for needs, and returns what asks its machines; afterwards all resources are free again."""
    with ExitStack() as rooms:
        yield lambda *needs: rooms.enter_context(reserved_room(AT_ONCE, needs))
    wait_for(lambda: _free(joined) == (3 * GPUS, 3 * CPUS), "resources of the cluster", 30)


def test_ranks_and_engines_have_their_room_before_either_takes_it(joined: RayCluster, reserve: Reserve) -> None:
    answers = reserve(need_of(RANKS), engines(GPUS, 1))("os:getpid")
    (of_ranks,) = room_for(joined, need_of(RANKS), "backend", 0.0)
    of_engines = room_for(joined, engines(GPUS, 1), "source.engine", 0.0)
    try:
        assert len({node.id for node in of_ranks.nodes}) == 2, "neighbours fill machines"
        assert {place.nodes[0].id for place in of_engines} == {node.id for node in joined.nodes()} - {
            node.id for node in of_ranks.nodes
        }
        assert len(of_engines) == GPUS
        assert len(set(answers.values())) == 3, "a process of each machine is asked"
        assert _free(joined)[0] == 0
        with pytest.raises(ConfigError, match=rf"wants 1 engines with 1 GPU, .* Free are 0 of {GPUS} GPU"):
            room_for(joined, engines(1, 1), "source.engine", 0.0)
    finally:
        _give_back(joined, [of_ranks, *of_engines])


def test_ranks_start_in_the_room_that_was_reserved_for_them(joined: RayCluster, reserve: Reserve) -> None:
    reserve(need_of(RANKS), engines(1, GPUS))
    assert _free(joined)[0] == 0
    with pytest.raises(RunFailedError, match="start_timeout_s"):
        open_ranks(RANKS, "rank_workers:Worker", (), TimeLimits(0.0, 60.0, 60.0), AT_ONCE)
    wait_for(lambda: _free(joined)[0] == 2 * GPUS, "the room of the ranks", 30)


def test_too_little_for_the_whole_run_is_refused_with_the_numbers_and_nothing_is_kept(
    reserve: Reserve, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        reserve(need_of(RANKS), engines(2, GPUS))
    text = str(raised.value)
    assert f"{2 * GPUS} ranks with {GPUS} GPU, {GPUS} CPU on each of 2 machines" in text
    assert f"2 engines with {GPUS} GPU, 1 CPU for each" in text
    assert text.count(f"{GPUS} of {GPUS} GPU") == 3, "each machine with what is free of it"
    assert "Waiting for room, 0 s at most: the run wants" in capsys.readouterr().err


def test_a_question_that_fails_on_a_machine_is_raised_with_its_name(reserve: Reserve) -> None:
    with pytest.raises(RunFailedError, match="No such file or directory") as raised:
        reserve(engines(1, 1))("os:listdir", "/no/such/folder")
    assert os.uname().nodename in raised.value.__notes__[0]


def test_engines_do_without_gpus_on_a_cluster_that_has_none() -> None:
    from spurline_ranks.cluster_room import each_needs

    nodes = [Node("1", "a", {"CPU": 4.0})]
    assert each_needs(engines(1, 2), nodes) == {"CPU": 1.0}
    assert each_needs(need_of(RANKS), nodes) == {"GPU": 1.0, "CPU": 1.0}


def _free(cluster: RayCluster) -> tuple[float, float]:
    """GPUs and CPUs that nobody has."""
    nodes = cluster.nodes()
    return sum(node.free.get("GPU", 0.0) for node in nodes), sum(node.free.get("CPU", 0.0) for node in nodes)


def _give_back(cluster: RayCluster, places: list[Place]) -> None:
    for place in places:
        cluster.release(place.group)
