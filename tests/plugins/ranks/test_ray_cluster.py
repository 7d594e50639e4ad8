"""The Ray cluster that a process joins: one connection for all, and nothing is left of the process on it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_clusters import CPUS, GPUS, two_machines
from run_helpers import wait_for

from spurline.errors import UserError
from spurline_ranks.group import ClusterRequest

pytest.importorskip("ray")
from spurline_ranks import ray_cluster
from spurline_ranks.doctor import access_to
from spurline_ranks.ray_cluster import RayCluster, free_of

pytestmark = pytest.mark.processes
SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    monkeypatch.setenv("RAY_ADDRESS", two_machines().address)
    cluster = RayCluster(ClusterRequest())
    cluster.open()
    yield cluster
    cluster.close()


def test_a_process_joins_the_cluster_it_is_told_of_and_says_what_is_there(joined: RayCluster) -> None:
    assert len({node.name for node in joined.nodes()}) == 2
    assert free_of(joined.nodes()).count(f"{GPUS} of {GPUS} GPU, {CPUS} of {CPUS} CPU on ") == 2
    assert access_to(ClusterRequest()).value.startswith("everybody who reaches its ports")
    joined.close()
    assert all(process.status() for process in psutil.Process().children()), "the cluster lives on"


def test_all_users_share_one_connection_which_leaves_signals_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_machines().address)
    at_sigterm = signal.getsignal(signal.SIGTERM)
    first, second = RayCluster(ClusterRequest()), RayCluster(ClusterRequest())
    try:
        first.open()
        second.open()
        assert signal.getsignal(signal.SIGTERM) is at_sigterm, "Ray has taken the signal that ends a run in order"
        with pytest.raises(UserError, match="with another address or runtime_env"):
            RayCluster(ClusterRequest(env_vars={"NAME": "value"})).open()
        first.close()
        first.close()
        assert len(second.nodes()) == 2
    finally:
        first.close()
        second.close()
    assert not ray_cluster.ray.is_initialized()


@pytest.mark.parametrize(("address", "said"), [("no address at all", ""), (None, "Start one with `ray start --head`")])
def test_a_cluster_that_is_not_there_is_refused_with_the_way_out(
    address: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cluster of other tests is not the machine's own.
    two_machines()
    monkeypatch.setenv("RAY_ADDRESS", address or "")
    with pytest.raises(UserError, match=f"cannot be joined: .*{said}.*set cluster.address or RAY_ADDRESS"):
        RayCluster(ClusterRequest()).open()


@pytest.mark.parametrize("said", ["cluster.address", "RAY_ADDRESS"])
def test_an_address_where_nobody_answers_is_refused_before_ray_waits_for_it(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unheard:
        # Bound and not listening: nobody else gets the port meanwhile.
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address if said == "RAY_ADDRESS" else "")
        monkeypatch.setattr(ray_cluster.ray, "init", None)
        with pytest.raises(UserError, match=r"does not answer at \S+ \(Connection refused\).*set cluster.address"):
            RayCluster(ClusterRequest("auto" if said == "RAY_ADDRESS" else address)).open()


def test_ranks_get_their_environment_and_none_is_left_of_a_driver_that_was_killed(tmp_path: Path) -> None:
    """One rank waits in an exchange meanwhile."""
    out = tmp_path / "said.json"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), *(place for place in sys.path if place)]),
        "RAY_ADDRESS": two_machines().address,
        "RAY_AUTH_MODE": "disabled",
    }
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, SUPPORT / "ray_driver.py", out]
        driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        wait_for(lambda: out.exists() or driver.poll() is not None, "the driver", 120)
        assert out.exists(), (tmp_path / "log").read_text()
        said = json.loads(out.read_text())
        assert said["said"] == ["yes", "yes"]
        assert all(map(psutil.pid_exists, said["pids"]))
    finally:
        driver.kill()
        driver.wait(10)
    wait_for(lambda: not any(map(psutil.pid_exists, said["pids"])), "the end of the ranks", 20)
