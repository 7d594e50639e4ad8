"""Ranks as actors of a Ray cluster: they behave as those of this machine do, wherever the cluster has put them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from living_processes import assert_all_gone
from ray_clusters import add_machine, two_machines
from run_helpers import wait_for

from spurline.errors import ConfigError, RankFailedError, RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_ranks.group import ClusterNeed, ClusterRequest, RankGroup, TimeLimits, open_ranks

pytest.importorskip("ray")
from spurline_ranks.cluster_room import ranks_per_machine, room_for
from spurline_ranks.ray_cluster import Node, RayCluster

Start = Callable[..., RankGroup]


@pytest.fixture(scope="module")
def joined() -> Iterator[RayCluster]:
    """The cluster of two machines, joined for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", two_machines().address)
        cluster = RayCluster(ClusterRequest())
        cluster.open()
        yield cluster
        cluster.close()


@pytest.fixture
def start(joined: RayCluster) -> Iterator[Start]:
    """Starts ranks of a worker of rank_workers.py, one on each machine; afterwards all resources are free again."""
    groups: list[RankGroup] = []

    def start(
        count: int = 2,
        *arguments: Any,
        start_s: float = 120.0,
        call_s: float = 60.0,
        per_node: int = 1,
        cluster: ClusterRequest | None = None,
        **request: Any,
    ) -> RankGroup:
        limits = TimeLimits(start_s, call_s, collective_s=60.0)
        asked = RankRequest(count, launch="ray", per_node=per_node, **request)
        groups.append(open_ranks(asked, "rank_workers:Worker", arguments, limits, cluster))
        return groups[-1]

    yield start
    for group in groups:
        group.close()
    _assert_all_free(joined)


@pytest.mark.processes
def test_ranks_of_two_machines_answer_as_those_of_one_process_do(start: Start) -> None:
    ranks = start(2, "x", num_threads=2)
    answers = ranks.call("describe")
    assert [(answer["rank"], answer["world"], answer["arguments"]) for answer in answers] == [
        (0, 2, ("x",)),
        (1, 2, ("x",)),
    ]
    assert [answer["threads"] for answer in answers] == [2, 2]
    assert ranks.call("echo", "all", per_rank=["zero", "one"]) == [("zero", "all"), ("one", "all")]
    shares = [np.arange(300_000, dtype=np.float64), np.ones(300_000)]
    for total in ranks.call("sum", per_rank=shares):
        assert np.array_equal(total, shares[0] + shares[1])
        assert total.flags.writeable
    for pid in ranks.call("pid"):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
    assert ranks.call("sum", np.ones(2))[1].tolist() == [2.0, 2.0]
    pids = [*ranks.call("pid"), *ranks.call("starts_a_process")]
    ranks.close()
    assert_all_gone(pids)
    ranks.close()
    with pytest.raises(RunFailedError, match="No rank is left to do `pid`: the ranks were closed"):
        ranks.call("pid")


@pytest.mark.processes
def test_what_ranks_write_is_added_to_their_logs_and_told_when_they_die(start: Start, tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-1.log").write_text("of an earlier run\n")
    ranks = start(2, cluster=ClusterRequest(log_dir=str(logs)))
    pids = ranks.call("pid")
    ranks.call("prints")
    with pytest.raises(RankFailedError, match=r"Rank 1 of 2 .* was killed by SIGABRT during `fails`") as raised:
        ranks.call("fails", 1, "abort")
    assert (raised.value.rank, raised.value.pid, raised.value.call) == (1, pids[1], "fails")
    assert "these are its last words" in str(raised.value)
    assert not any(words in str(raised.value) for words in ("of an earlier run", ":job_id:"))
    assert_all_gone(pids)
    texts = [(logs / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert [text.count("said by a rank\n") for text in texts] == [3, 3], "its own output and that of what it starts"
    assert texts[1].startswith(f"of an earlier run\nThe output of process {pids[1]} on ")


@pytest.mark.processes
def test_a_rank_that_stands_still_is_named_with_what_it_does_and_its_stack(start: Start) -> None:
    ranks = start(2, call_s=3.0)
    pids = ranks.call("pid")
    with pytest.raises(RankFailedError, match="was not done within 3 s") as raised:
        ranks.call("fails", 1, "sleep")
    text = str(raised.value)
    assert f"rank 1 of 2 (process {pids[1]} on {os.uname().nodename}" in text
    assert "micro-batch 5 of 8, forward" in text
    first, _, second = text.partition("Stack of rank 1:")
    assert "in all_reduce" in first.partition("Stack of rank 0:")[2]
    assert "in _stands_still_here" in second
    assert_all_gone(pids)


@pytest.mark.processes
def test_machines_that_do_not_start_their_ranks_in_time_are_named(start: Start) -> None:
    with pytest.raises(RunFailedError, match=r"did not start ranks within 0 s .*start_timeout_s"):
        start(2, start_s=0.0)


@pytest.mark.processes
def test_closing_ends_a_call_that_another_thread_waits_for_and_stopped_ranks(start: Start) -> None:
    ranks = start(2)
    pids = ranks.call("pid")
    os.kill(pids[1], signal.SIGSTOP)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            ranks.call("waits", "exchange")
        except RunFailedError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    ranks.close()
    thread.join(10)
    assert [str(error) for error in errors] == ["`waits` has no answer: the ranks were closed."]
    assert_all_gone(pids)


@pytest.mark.processes
def test_ranks_of_a_machine_that_is_lost_are_named_within_a_minute(start: Start) -> None:
    """The machine is killed as a whole; the other rank waits for it in an exchange."""
    cluster = two_machines()
    lost = add_machine(cluster)
    ranks = start(3)
    pids = ranks.call("pid")
    victim = next(rank for rank, pid in enumerate(pids) if psutil.Process(pid).parents()[1].pid == _raylet(lost))
    threading.Timer(0.5, lambda: cluster.remove_node(lost, allow_graceful=False)).start()
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=rf"Rank {victim} of 3 .* was lost with its machine .* during `waits`"):
        ranks.call("waits", "exchange")
    assert time.monotonic() - began < 60
    assert_all_gone(pids)


@pytest.mark.processes
@pytest.mark.parametrize("per_node", [1, 2])
def test_ranks_with_gpus_are_put_on_as_few_machines_as_are_asked_for(joined: RayCluster, per_node: int) -> None:
    need = ClusterNeed.of_ranks(RankRequest(2, "cuda", "ray", per_node))
    assert need is not None
    (place,) = room_for(joined, need, "backend", 60.0)
    joined.release(place.group)
    assert len({node.id for node in place.nodes}) == 2 // per_node
    _assert_all_free(joined)


@pytest.mark.parametrize(
    ("request_", "gpus", "expected"),
    [
        ({"count": 4}, (8, 8), 4),
        ({"count": 16}, (8, 8), 8),
        ({"count": 16, "per_node": 4}, (8, 8), 4),
        ({"count": 2, "per_node": 4}, (8, 8), 2),
        ({"count": 4}, (), 4),
        ({"count": 12}, (8, 4), "machines, at most 8 on node0, at most 4 on node1. Set ranks_per_node"),
        ({"count": 12}, (8, 8), "12 ranks, which do not fill machines with 8 ranks each. Set ranks to a multiple of 8"),
    ],
)
def test_as_many_ranks_go_on_one_machine_as_it_has_room_for(
    request_: dict[str, Any], gpus: Sequence[int], expected: Any
) -> None:
    nodes = [Node(str(number), f"node{number}", {"GPU": count, "CPU": 64.0}) for number, count in enumerate(gpus)]
    need = ClusterNeed.of_ranks(RankRequest(device="cuda", launch="ray", **request_))
    assert isinstance(need, ClusterNeed)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            ranks_per_machine(need, nodes)
    else:
        assert ranks_per_machine(need, nodes) == expected


def _raylet(node: Any) -> int:
    """Process id of a machine of the cluster."""
    return node.all_processes["raylet"][0].process.pid


def _assert_all_free(cluster: RayCluster) -> None:
    def free() -> bool:
        return all(node.free.get(kind) == node.has(kind) for node in cluster.nodes() for kind in ("CPU", "GPU"))

    # Ray counts those of a lost machine until it has missed several of its heartbeats.
    wait_for(free, "resources of the cluster", 60)
