"""Ranks of this machine: they answer together, a failure ends all and says which, and nothing of them is left over."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from listening import listening, reachable
from living_processes import assert_all_gone
from run_helpers import wait_for

from spurline.errors import ConfigError, DataError, RankFailedError, RunFailedError
from spurline.protocols.ranks import RankRequest
from spurline_models import machine
from spurline_ranks import devices, processes
from spurline_ranks.group import RankGroup, TimeLimits, open_ranks

pytestmark = pytest.mark.processes

Start = Callable[..., RankGroup]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacks of ranks that cannot write them are waited for."""
    monkeypatch.setattr(processes, "STACKS_TIMEOUT_S", 2.0)


CALL_S = 60.0
"""Seconds of a call, and of what ranks exchange in it. Whatever is found before was found without waiting for it."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks of a worker of rank_workers.py; afterwards none of them is left."""
    groups: list[RankGroup] = []

    def start(
        count: int = 2,
        *arguments: Any,
        worker: str = "Worker",
        call_s: float = CALL_S,
        collective_s: float = CALL_S,
        **request: Any,
    ) -> RankGroup:
        limits = TimeLimits(120.0, call_s, collective_s)
        groups.append(open_ranks(RankRequest(count, **request), f"rank_workers:{worker}", arguments, limits))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def test_ranks_answer_in_order_with_their_own_arguments_and_compute_together(start: Start) -> None:
    ranks = start(4, "x", {"a": 1})
    answers = ranks.call("describe")
    assert [answer["rank"] for answer in answers] == [0, 1, 2, 3]
    assert {answer["world"] for answer in answers} == {ranks.size} == {4}
    assert len({answer["pid"] for answer in answers}) == 4
    assert all(answer["arguments"] == ("x", {"a": 1}) for answer in answers)
    assert ranks.call("echo", "all", per_rank=[0, 1, 2, 3]) == [(rank, "all") for rank in range(4)]
    shares = [np.arange(3_000_000, dtype=np.float64), *[np.ones(3_000_000)] * 3]
    for total in ranks.call("sum", per_rank=shares):
        assert np.array_equal(total, shares[0] + 3)


def test_ranks_of_one_machine_listen_on_its_loopback_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    before = listening([psutil.Process()])
    ranks = start(2)
    ranks.call("sum", np.ones(2))
    heard = listening(psutil.Process(pid) for pid in (os.getpid(), *ranks.call("pid"))) - before
    assert len(heard) == 3, "a store, and where each rank is reached by the other"
    assert reachable(heard) == []
    # Where the name of the machine leads says which interface gloo takes by itself, so that this may not show it above.
    environment = ranks.call("describe")[0]["environment"]
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"


def test_interfaces_are_left_to_whoever_has_set_them_and_nccl_s_to_ranks_that_send_weights_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of-the-user")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    here, beyond = (devices.local_environments(RankRequest(1, peers_elsewhere=there))[0] for there in (False, True))
    assert here == {"NCCL_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    assert beyond == {"CUDA_VISIBLE_DEVICES": ""}


def test_ranks_see_the_environment_and_folder_of_the_time_of_their_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(1).close()
    monkeypatch.setenv("SAID_LATER", "yes")
    monkeypatch.chdir(tmp_path)
    (answer,) = start(1).call("describe")
    assert answer["environment"]["SAID_LATER"] == "yes"
    assert Path(answer["folder"]) == tmp_path


@pytest.mark.parametrize(("threads", "expected"), [(None, max(1, machine.num_cores() // 2)), (3, 3)])
def test_the_cores_are_divided_among_the_ranks_unless_threads_are_asked_for(
    start: Start, threads: int | None, expected: int
) -> None:
    answers = start(2, num_threads=threads).call("describe")
    assert [answer["threads"] for answer in answers] == [expected, expected]


def test_ranks_go_on_after_the_signals_that_end_a_terminal_s_processes(start: Start) -> None:
    ranks = start(2)
    pids = ranks.call("pid")
    assert all(os.getsid(pid) == pid for pid in pids), "Ctrl-C reaches them"
    for pid in pids:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
    assert ranks.call("sum", np.ones(2))[0].tolist() == [2.0, 2.0]


def test_what_a_rank_prints_does_not_reach_the_terminal(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    start(2).call("prints")
    assert capfd.readouterr() == ("", "")


def test_an_error_of_ours_is_raised_as_what_it_is_with_a_note_of_where(start: Start) -> None:
    ranks = start(2)
    pids = ranks.call("pid")
    with pytest.raises(DataError) as raised:
        ranks.call("fails", 1, "data")
    assert str(raised.value) == "rows.jsonl:3: prompt is empty. Remove the row."
    (note,) = raised.value.__notes__
    assert note == f"This is from rank 1 of 2 (process {pids[1]} on {os.uname().nodename}), during `fails`."
    assert "rank_workers.py" in str(raised.value.__cause__)
    assert "in _fail" in str(raised.value.__cause__)
    assert_all_gone(pids)


def test_another_error_names_rank_process_call_and_traceback(start: Start) -> None:
    ranks = start(2)
    pids = ranks.call("pid")
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"Rank 1 of 2 .* failed during `fails`: ValueError: broken") as raised:
        ranks.call("fails", 1, "value")
    # Measured: 0.3 s, most of which waits for a cause.
    assert time.monotonic() - began < CALL_S
    error = raised.value
    assert (error.rank, error.node, error.pid, error.call) == (1, os.uname().nodename, pids[1], "fails")
    assert "in _fail" in error.traceback
    assert error.traceback in str(error)
    assert_all_gone(pids)


def test_a_killed_rank_is_named_and_not_the_one_that_missed_it(start: Start) -> None:
    ranks = start(3)
    pids = ranks.call("pid")
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"Rank 2 of 3 .* was killed by SIGKILL.* during `fails`") as raised:
        ranks.call("fails", 2, "kill")
    assert "Its last work: micro-batch 1 of 8, for 0 s." in str(raised.value)
    assert time.monotonic() - began < CALL_S
    assert (raised.value.rank, raised.value.pid) == (2, pids[2])
    assert_all_gone(pids)


def test_a_rank_that_dies_between_calls_is_named_by_the_next(start: Start) -> None:
    ranks = start(2)
    pids = ranks.call("pid")
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(RankFailedError, match=r"Rank 0 of 2 .* was killed by SIGKILL"):
        ranks.call("pid")
    with pytest.raises(RunFailedError, match=r"No rank is left to do `pid`: RankFailedError: Rank 0"):
        ranks.call("pid")
    assert_all_gone(pids)


@pytest.mark.parametrize(
    ("method", "said"),
    [("answers_with_a_lock", "cannot pickle"), ("answers_what_cannot_be_read", "Rank 0 .*: ValueError")],
)
def test_an_answer_that_cannot_be_sent_or_read_is_an_error_and_not_silence(
    start: Start, method: str, said: str
) -> None:
    with pytest.raises(RankFailedError, match=said):
        start(1).call(method)


def test_a_rank_that_stands_still_is_named_with_what_it_does_and_its_stack(start: Start) -> None:
    ranks = start(2, call_s=3.0)
    pids = ranks.call("pid")
    with pytest.raises(RankFailedError, match=r"was not done within 3 s.* backend.call_timeout_s") as raised:
        ranks.call("fails", 1, "sleep")
    text = str(raised.value)
    assert f"rank 1 of 2 (process {pids[1]} on {os.uname().nodename}): micro-batch 5 of 8, forward" in text
    first, _, second = text.partition("Stack of rank 1:")
    assert "in all_reduce" in first.partition("Stack of rank 0:")[2]
    assert "in _stands_still_here" in second
    assert "_listen" not in text
    assert "rank_main.py" not in text
    assert_all_gone(pids)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_that_the_others_wait_for_too_long_is_named_beside_the_one_that_gave_up(
    start: Start, stopped: bool
) -> None:
    ranks = start(2, collective_s=2.0)
    if stopped:
        os.kill(ranks.call("pid")[1], signal.SIGSTOP)
    with pytest.raises(RankFailedError, match=r"Rank 0 of 2 .* failed during `fails`: .*[Tt]imed out") as raised:
        ranks.call("fails", 1, "sleep")
    (note,) = raised.value.__notes__
    assert "rank 1 of 2" in note
    for words in ("is stopped",) if stopped else ("micro-batch 5 of 8, forward", "in _stands_still_here"):
        assert words in note


def test_all_groups_of_a_worker_have_the_time_limit_of_an_exchange(start: Start) -> None:
    assert start(2, worker="InGroups", collective_s=17.0).call("timeouts_s") == [[17.0] * 4] * 2


@pytest.mark.parametrize("size", [1, 3_000_000], ids=["small", "more than fits in a pipe"])
def test_a_rank_that_cannot_run_python_is_named_as_well_with_why_there_is_no_stack(start: Start, size: int) -> None:
    ranks = start(2, call_s=2.0)
    pids = ranks.call("pid")
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 .*: waiting for a call, `pid` is done, for \d s") as raised:
        ranks.call("sum", np.ones(size))
    assert raised.value.pid == pids[1], "not the one that waits for it"
    assert f"Stack of rank 1:\n(no stack: process {pids[1]} is stopped" in str(raised.value)
    assert_all_gone(pids)


def test_a_rank_that_stands_still_while_it_starts_is_named_with_its_stack_and_the_limit_beforehand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spurline_ranks.group.PATIENCE_S", 0.5)
    with pytest.raises(RankFailedError, match=r"`start` was not done within 5 s.*start_timeout_s") as raised:
        open_ranks(RankRequest(2), "rank_workers:StandsStill", (), TimeLimits(5, 1, 60))
    assert "in _stands_still_here" in str(raised.value).partition("Stack of rank 1:")[2]
    said = capsys.readouterr().err
    assert re.search(r"Waiting for `start` for \d s \(limit backend.start_timeout_s: 5 s\)", said)


def test_a_long_wait_says_who_is_missing(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = start(2)
    monkeypatch.setattr("spurline_ranks.group.PATIENCE_S", 0.5)
    assert ranks.call("after", "done", per_rank=[0.0, 1.2]) == ["done", "done"]
    said = capsys.readouterr().err
    assert re.search(r"Waiting for `after` for \d s \(limit backend.call_timeout_s: 60 s\)", said)
    assert "1 of 2 ranks have not answered:\n  rank 1 of 2" in said
    assert "in `after`, for" in said
    assert "rank 0 of 2" not in said


def test_a_rank_that_cannot_be_made_fails_the_start_as_what_it_is() -> None:
    with pytest.raises(DataError, match="this rank cannot be made") as raised:
        open_ranks(RankRequest(2), "rank_workers:FailsToStart", (), TimeLimits(60, 60, 60))
    assert "rank 1 of 2" in raised.value.__notes__[0]
    assert "`start`" in raised.value.__notes__[0]


def test_a_worker_whose_module_cannot_be_imported_says_so() -> None:
    with pytest.raises(RankFailedError, match=r"Rank \d of 2 .* failed during `start`: ModuleNotFoundError: No module"):
        open_ranks(RankRequest(2), "no_such_module:Worker", (), TimeLimits(60, 60, 60))


def test_closing_ends_a_call_that_another_thread_waits_for(start: Start) -> None:
    ranks = start(2)
    pids = ranks.call("pid")
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
    ranks.close()
    with pytest.raises(RunFailedError, match="No rank is left to do `pid`: the ranks were closed"):
        ranks.call("pid")


def test_what_a_rank_has_started_ends_with_it(start: Start) -> None:
    ranks = start(2)
    started = ranks.call("starts_a_process")
    ranks.close()
    assert_all_gone(started)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_ends_the_ranks_as_its_answers_would_be_taken_for_others(start: Start) -> None:
    ranks = start(2)
    pids = ranks.call("pid")

    def interrupt() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ranks.call("after", 5.0, "late")
    assert_all_gone(pids)


def test_what_a_rank_has_told_counts_and_not_that_it_ended_then(start: Start) -> None:
    ranks = start(2)
    pids = ranks.call("pid")
    with pytest.raises(DataError, match="prompt is empty"):
        ranks.call("fails_and_ends", 1)
    assert_all_gone(pids)


def test_nothing_is_left_of_a_controller_that_was_killed(tmp_path: Path) -> None:
    """Its ranks are idle, in an exchange with others, waiting to receive, and in long computations, of which one lets
    no thread run."""
    script = Path(__file__).parents[2] / "support" / "rank_controller.py"
    out = tmp_path / "said.json"
    with (tmp_path / "log").open("w") as log:
        controller = subprocess.Popen([sys.executable, script, out], stderr=log, stdout=log)
    try:
        wait_for(lambda: out.exists() or controller.poll() is not None, "the controller")
        assert out.exists(), (tmp_path / "log").read_text()
        said = json.loads(out.read_text())
        family = psutil.Process(controller.pid).children(recursive=True)
        assert {process.pid for process in family} >= set(said["pids"])
        time.sleep(0.5)
    finally:
        controller.kill()
        controller.wait(10)
    assert_all_gone([process.pid for process in family], within_s=5)
    for port in said["ports"]:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize(
    ("request_", "visible", "expected"),
    [
        ({"count": 2}, ("0", "1", "2"), ["0", "1"]),
        ({"count": 2, "gpus": (2, 0)}, ("4", "5", "6"), ["6", "4"]),
        ({"count": 3}, ("0", "1"), "backend.ranks asks for 3 ranks with a GPU each, and there are 2 GPUs. Set it to 2"),
        ({"count": 1, "gpus": (2,)}, ("0", "1"), "backend.gpus names GPU 2, but this machine has 0, 1"),
        ({"count": 1}, (), "and there are 0 GPUs. Set device: cpu"),
    ],
)
def test_each_rank_sees_one_gpu_and_too_few_are_refused(
    request_: dict[str, Any], visible: Sequence[str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: tuple(visible))
    request = RankRequest(device="cuda", **request_)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            devices.local_environments(request)
    else:
        environments = devices.local_environments(request)
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == expected
