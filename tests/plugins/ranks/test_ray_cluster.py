"""The Ray cluster that a process works with: its own or one it joins, one connection for all, gone with the process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from listening import family_of, listening, reachable
from ray_clusters import CPUS, GPUS, two_machines
from run_helpers import wait_for

from spurline.errors import UserError
from spurline_ranks.group import ClusterRequest

pytest.importorskip("ray")
from ray._raylet import AuthenticationTokenLoader

from spurline_ranks import ray_cluster
from spurline_ranks.doctor import access_to
from spurline_ranks.ray_cluster import RayCluster, free_of
from spurline_ranks.ray_protection import folder_of_ours, read_authentication, starting_for_us_alone

pytestmark = pytest.mark.processes
SUPPORT = Path(__file__).parents[2] / "support"


def test_a_process_without_a_cluster_starts_one_for_all_its_users_and_ends_it_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Another run's own cluster, or one of a test, is not taken for one to join.
    two_machines()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    me = psutil.Process()
    before, heard_before = set(me.children(recursive=True)), listening([me])
    at_sigterm = signal.getsignal(signal.SIGTERM)
    first, second = RayCluster(ClusterRequest()), RayCluster(ClusterRequest())
    try:
        first.open()
        second.open()
        assert first.is_own
        assert len(first.nodes()) == 1
        started = set(me.children(recursive=True)) - before
        heard = listening([*started, me]) - heard_before
        assert len(heard) > 3, "nothing was looked at"
        assert reachable(heard) == []
        session = Path(ray_cluster.ray._private.worker._global_node.get_session_dir_path())
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in session.parents), "others may put code there"
        assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys(), "whatever is started here gets it"
        assert _answers_with_tokens(started) == {"its own": True, "another": False}
        assert access_to(ClusterRequest()).value == "those who have its token"
        assert signal.getsignal(signal.SIGTERM) is at_sigterm, "Ray has taken the signal that ends a run in order"
        with pytest.raises(UserError, match="with another address or runtime_env"):
            RayCluster(ClusterRequest(env_vars={"NAME": "value"})).open()
        first.close()
        first.close()
        assert len(second.nodes()) == 1
    finally:
        first.close()
        second.close()
    _assert_all_gone([process.pid for process in set(me.children(recursive=True)) - before])
    assert not session.exists()


def test_every_cluster_that_a_process_starts_has_a_token_of_its_own_and_the_user_s_settings_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/of/the/user")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
    tokens: set[str] = set()
    for _ in range(2):
        with starting_for_us_alone():
            tokens.add(token := os.environ["RAY_AUTH_TOKEN"])
            assert AuthenticationTokenLoader.instance().get_raw_token() == token, "this process has that of another"
        assert {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")} == before
    read_authentication()
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize(("length", "is_there"), [(22, True), (23, False)])
def test_ray_s_folder_is_where_the_user_wants_it_unless_a_socket_s_path_is_too_long_then(
    length: int, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        chosen = f"{scratch}/{'x' * (length - len(scratch) - 1)}"
        monkeypatch.setenv("RAY_TMPDIR", chosen)
        with folder_of_ours() as folder:
            assert folder.startswith(f"{chosen}/") == is_there
            assert Path(folder).parent.stat().st_mode & 0o077 == 0
            assert len(f"{folder}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store") <= 107
        assert not Path(folder).parent.exists()


def test_a_process_joins_the_cluster_it_is_told_of_and_says_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_machines().address)
    cluster = RayCluster(ClusterRequest())
    cluster.open()
    try:
        assert not cluster.is_own
        assert len({node.name for node in cluster.nodes()}) == 2
        assert free_of(cluster.nodes()).count(f"{GPUS} of {GPUS} GPU, {CPUS} of {CPUS} CPU on ") == 2
        assert access_to(ClusterRequest()).value.startswith("everybody who reaches its ports")
    finally:
        cluster.close()
    assert all(process.status() for process in psutil.Process().children()), "the cluster lives on"


def test_a_cluster_that_is_not_there_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "no address at all")
    with pytest.raises(
        UserError, match=r"The Ray cluster cannot be joined: .*set cluster.address or RAY_ADDRESS to another one"
    ):
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
        with pytest.raises(UserError, match=r"nobody answers at \S+ \(Connection refused\).*set cluster.address"):
            RayCluster(ClusterRequest("auto" if said == "RAY_ADDRESS" else address)).open()


@pytest.mark.parametrize("whose", ["joined", "own"])
def test_ranks_get_their_environment_and_nothing_is_left_of_a_driver_that_was_killed(
    tmp_path: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank waits in an exchange meanwhile. A cluster that was joined lives on. The next start removes the files of
    one that was started."""
    out = tmp_path / "said.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *(place for place in sys.path if place)])
    if whose == "joined":
        environment |= {"RAY_ADDRESS": two_machines().address, "RAY_AUTH_MODE": "disabled"}
    # What a cluster leaves behind whose driver was killed; in a path as short as sockets need.
    environment["TMPDIR"] = scratch = tempfile.mkdtemp(dir="/tmp")
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, SUPPORT / "ray_driver.py", out]
        driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        wait_for(lambda: out.exists() or driver.poll() is not None, "the driver", 120)
        assert out.exists(), (tmp_path / "log").read_text()
        said = json.loads(out.read_text())
        assert said["said"] == ["yes", "yes"]
        if whose == "own":
            heard = listening(family_of(driver.pid))
            assert len(heard) > 5, "nothing was looked at"
            assert reachable(heard) == [], "neither Ray nor the ranks need more than this machine"
        monkeypatch.setenv("RAY_TMPDIR", scratch)
        (*folders,) = Path(scratch).glob("spurl-ray-*")
        assert len(folders) == (whose == "own")
        with folder_of_ours():
            assert all((folder / "r").exists() for folder in folders), "its owner lives"
        # Ray's agents look for the head for a minute before they end.
        cluster = psutil.Process(driver.pid).children(recursive=True)
        family = {process.pid for process in cluster if not process.name().endswith("Agent")} | set(said["pids"])
        assert (len(family) > 2) == (whose == "own")
        assert all(map(psutil.pid_exists, said["pids"]))
    finally:
        driver.kill()
        driver.wait(10)
    _assert_all_gone(list(family), within_s=20)
    wait_for(lambda: _start_and_look(folders), "the files to be removed", 20)
    shutil.rmtree(scratch, ignore_errors=True)


def _start_and_look(folders: Sequence[Path]) -> bool:
    """Whether none of them is there after a start; an agent of Ray may write into one meanwhile."""
    with folder_of_ours():
        return not any(folder.exists() for folder in folders)


_CLIENT = """
import json, os, sys
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient
from ray.exceptions import AuthenticationError
said = {}
for name, token in json.loads(sys.argv[2]).items():
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=5)
        said[name] = True
    except AuthenticationError:
        said[name] = False
print(json.dumps(said))
"""


def _answers_with_tokens(started: set[psutil.Process]) -> dict[str, bool]:
    """Whether the head answers other processes of this user that have its token, or another one."""
    (own,) = {process.environ()["RAY_AUTH_TOKEN"] for process in started if "gcs_server" in process.name()}
    tokens = json.dumps({"its own": own, "another": "0" * len(own)})
    address = ray_cluster.ray.get_runtime_context().gcs_address
    client = subprocess.run(
        [sys.executable, "-c", _CLIENT, address, tokens], capture_output=True, text=True, timeout=60
    )
    assert client.returncode == 0, client.stderr
    return json.loads(client.stdout)


def _assert_all_gone(pids: Sequence[int], within_s: float = 5.0) -> None:
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the end of processes", within_s)
