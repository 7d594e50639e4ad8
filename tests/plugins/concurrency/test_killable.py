"""Worker processes of rewards: whatever a function does there, the run goes on, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from living_processes import is_alive
from rl_attempts import run
from runaway_rewards import fingerprint

from spurline.errors import ConfigError, DataError, PluginError, RunFailedError
from spurline_concurrency.killable import KillablePool, TookTooLong
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import FunctionRewardConfig
from spurline_rl.rewards.function import FunctionReward
from spurline_rl.scoring import reward_terms

pytestmark = pytest.mark.processes
GENEROUS_S = 60.0


def answer(response: str, **row: Any) -> Answer:
    return Answer("a prompt", response, "4", row)


def make_reward(function: str = "behaves", **settings: Any) -> FunctionReward:
    return FunctionReward(FunctionRewardConfig(path=f"runaway_rewards:{function}", **settings))


def scores(reward: FunctionReward, *answers: Answer) -> list[float | Exception]:
    """Of all at the same time."""

    async def together() -> list[Any]:
        terms = (reward_terms({"mine": reward}, each) for each in answers)
        return await asyncio.gather(*terms, return_exceptions=True)

    return [one if isinstance(one, Exception) else one["mine"] for one in run(together())]


def why(reward: FunctionReward, asked: Answer) -> str:
    """Why it failed."""
    [failed] = scores(reward, asked)
    assert isinstance(failed, AttemptFailedError), failed
    return str(failed)


@pytest.fixture(scope="module")
def quick() -> Iterator[FunctionReward]:
    """Two workers, with little time and memory."""
    reward = make_reward(timeout_s=0.7, workers=2, memory_gb=2)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[FunctionReward]:
    # Without limits, as users may write it.
    reward = make_reward(timeout_s=float("inf"), import_timeout_s=float("inf"), workers=1)
    yield reward
    reward.close()


def wait_until_dead(*pids: int) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


@pytest.mark.parametrize("runaway", ["spin", "deadlock"])
def test_a_call_that_never_returns_fails_in_time_and_the_others_go_on(quick, runaway):
    failed, *others = scores(quick, answer(runaway), *(answer("fine") for _ in range(8)))
    assert others == [1.0] * 8
    assert str(failed) == (
        f"Reward 'mine' on the response '{runaway}': The function runaway_rewards:behaves did not return within 0.7 s."
    )


def test_many_workers_may_be_killed_at_the_same_time():
    reward = make_reward(timeout_s=1.0, workers=16)
    try:
        assert scores(reward, answer("fine")) == [1.0]
        failed = scores(reward, *(answer("deadlock") for _ in range(48)))
    finally:
        reward.close()
    assert {str(one) for one in failed} == {
        "Reward 'mine' on the response 'deadlock': The function runaway_rewards:behaves did not return within 1 s."
    }


def test_a_call_that_takes_all_memory_fails(quick):
    assert "runaway_rewards:behaves took more than memory_gb: 2." in why(quick, answer("eat memory"))
    assert scores(quick, answer("fine")) == [1.0]


def test_what_calls_print_is_shown_with_the_runs_messages(capfd):
    reward = make_reward(workers=2)
    try:
        assert scores(reward, *(answer("shout") for _ in range(4))) == [1.0] * 4
    finally:
        reward.close()
    shown = capfd.readouterr()
    # Two workers may write at the same time, so that lines run together.
    assert shown.err.count("first words") == 4
    assert not shown.out


def test_what_a_killed_call_has_started_is_killed_too(patient, tmp_path):
    report = tmp_path / "pids"
    # However it ends; a time limit would be one on starting programs as well.
    assert "exit code -6" in why(patient, answer("leave programs running", report=str(report), dies=True))
    wait_until_dead(*map(int, report.read_text().split()))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are not the supervisor's")
def test_what_calls_have_left_does_not_stay_as_zombies():
    reward = make_reward(workers=1)
    try:
        [supervisor] = map(int, scores(reward, answer("leave orphans")))
        [worker] = map(int, scores(reward, answer("process")))
        deadline = time.monotonic() + GENEROUS_S
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children")
        while (left := children.read_text().split()) != [str(worker)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
    finally:
        reward.close()


def test_a_call_that_crashes_its_process_fails_and_leaves_its_neighbours_alone(quick):
    crashed, *others = scores(quick, answer("die"), *(answer("fine") for _ in range(8)))
    assert "worker process of runaway_rewards:behaves died: exit code -6" in str(crashed)
    assert others == [1.0] * 8


def test_errors_of_the_function_have_their_kind_and_their_place(patient, tmp_path):
    [refused] = scores(patient, answer("bad row"))
    assert isinstance(refused, DataError)
    assert str(refused) == "no unit in this row"
    raising = FunctionReward(FunctionRewardConfig(path="reward_functions:raises"))
    try:
        assert re.search(
            r"Reward 'mine' on the response 'x': reward_functions:raises failed: ValueError: no such unit "
            r"\(.*/reward_functions\.py:\d+ in raises\)",
            why(raising, answer("x")),
        )
        # As rows of TRL are, without `columns`.
        unnamed = Answer("p", "x", None, {"prompt": "p", "solution": "4"})
        assert "no such unit" in why(raising, unnamed)
        assert why(raising, unnamed).endswith("is meant, set `columns: {reference: solution}` of the dataset.")
        assert "answer.reference" not in why(raising, replace(unnamed, row={"prompt": "p"}))
    finally:
        raising.close()


def test_what_is_no_number_is_told_as_in_the_runs_own_process(patient):
    # What a call starts finds the modules that it would find started by the run.
    place = os.environ.get("PYTHONPATH", "")
    told = why(patient, answer("path"))
    assert told.startswith(f"Reward 'mine' returned {place!r:.150}")
    assert told.endswith(" for the response 'path'; it must return a number.")
    assert scores(patient, answer("numpy")) == [0.5]


def test_each_worker_has_its_own_globals_and_no_standard_input(patient):
    [before], [after] = scores(patient, answer("calls")), scores(patient, answer("calls"))
    assert after == before + 1
    assert scores(patient, answer("read")) == [0.0]


ROW: dict[str, Any] = {
    "text": "Ω\ud83d",
    "nested": [{"a": [1, 2.5, None, True]}],
    "pair": (1, float("inf")),
    "day": date(2024, 2, 29),
    "moment": datetime(2024, 2, 29, 12, 30, 0, 5),
    "span": timedelta(days=-1, microseconds=3),
    "bytes": b"\x00\xff",
    "decimal": Decimal("1.10"),
    "number": np.int64(3),
    "vector": np.arange(3, dtype=np.int16),
}


def test_a_row_arrives_as_it_is(patient):
    assert scores(patient, answer("row", **ROW)) == [fingerprint(ROW)]


def test_a_row_that_cannot_be_sent_is_the_datas_fault_with_the_way_out(patient):
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for picture in (lambda: None, deep):
        [refused] = scores(patient, answer("row", fine=1, picture=picture))
        assert isinstance(refused, DataError)
        assert "The column 'picture' cannot be sent" in str(refused)
        assert "set in_process: true" in str(refused)


def test_an_async_function_waits_side_by_side_and_the_call_that_blocks_is_the_only_one_to_fail():
    reward = make_reward("judges", timeout_s=3.0)
    try:
        process, *_ = scores(reward, answer("process"), *(answer("fine") for _ in range(50)))
        assert process != os.getpid()
        assert scores(reward, answer("process")) == [process]
        answers = [answer(what) for what in ("block", "wait", "exit", "fine", "fine")]
        blocked, late, exited, *fine = scores(reward, *answers)
        assert "did not return within 3 s" in str(blocked)
        assert "did not return within 3 s" in str(late)
        assert "SystemExit: 3" in str(exited)
        assert fine == [1.0, 1.0]
        crashed, fine = scores(reward, answer("die"), answer("fine"))
        assert "exit code -6" in str(crashed)
        assert fine == 1.0
    finally:
        reward.close()


def test_calls_that_were_lost_beside_one_that_blocks_are_made_again_side_by_side():
    reward = make_reward("judges", timeout_s=1.0)

    async def ask_when_it_is_late() -> list[Any]:
        blocked = asyncio.ensure_future(reward_terms({"mine": reward}, answer("block")))
        # The worker is killed after 2 s.
        await asyncio.sleep(1.5)
        asked = (reward_terms({"mine": reward}, answer("process")) for _ in range(8))
        return await asyncio.gather(blocked, *asked, return_exceptions=True)

    try:
        assert scores(reward, answer("fine")) == [1.0]
        blocked, first, *others = run(ask_when_it_is_late())
    finally:
        reward.close()
    assert "did not return within 1 s" in str(blocked)
    assert others == [first] * 7, "all are answered by one process"


def test_a_call_that_computes_is_not_blamed_for_one_that_does_not_let_itself_be_cancelled():
    reward = make_reward("judges", timeout_s=1.0)

    async def compute_when_it_is_late() -> list[Any]:
        refused = asyncio.ensure_future(reward_terms({"mine": reward}, answer("refuse")))
        # The worker is killed after 2 s.
        await asyncio.sleep(1.7)
        computed = reward_terms({"mine": reward}, answer("compute"))
        return await asyncio.gather(refused, computed, return_exceptions=True)

    try:
        assert scores(reward, answer("fine")) == [1.0]
        refused, computed = run(compute_when_it_is_late())
    finally:
        reward.close()
    assert "did not return within 1 s" in str(refused)
    assert computed == {"mine": 1.0}


def test_nothing_is_left_when_the_reward_is_closed_in_the_middle_of_a_call(tmp_path):
    reward = make_reward(timeout_s=GENEROUS_S, workers=1)
    report = tmp_path / "pids"

    async def close_while_calling() -> int:
        [worker] = [int((await reward_terms({"mine": reward}, answer("process")))["mine"])]
        asked = answer("leave programs running", report=str(report))
        call = asyncio.ensure_future(reward_terms({"mine": reward}, asked))
        while not report.exists() or not report.read_text():
            await asyncio.sleep(0.01)
        reward.close()
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], Exception)
        return worker

    worker = run(close_while_calling())
    wait_until_dead(worker, *map(int, report.read_text().split()))


def test_nothing_is_left_when_the_run_is_killed_in_the_middle_of_a_call(tmp_path):
    report = tmp_path / "pids"
    code = (
        "import asyncio, os, pathlib, sys, threading, time\n"
        "from spurline_rl.protocols.reward import Answer\n"
        "from spurline_rl.rewards.configs import FunctionRewardConfig\n"
        "from spurline_rl.rewards.function import FunctionReward\n"
        "reward = FunctionReward(FunctionRewardConfig(path='runaway_rewards:behaves'))\n"
        "asked = Answer('', 'leave programs running', None, {'report': sys.argv[1]})\n"
        "threading.Thread(target=lambda: asyncio.run(reward.score(asked)), daemon=True).start()\n"
        "report = pathlib.Path(sys.argv[1])\n"
        "while not report.exists() or not report.read_text(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", code, str(report)], env=environment, timeout=60, check=False)
    assert killed.returncode == -9
    wait_until_dead(*map(int, report.read_text().split()))


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("while True:\n    pass\n", r"(?s)Importing .*/hangs\.py:f takes longer than 1 s\..*hangs\.py\", line [12]"),
        ("x = bytearray(3 << 30)\n", r"cannot be imported from .* MemoryError"),
        ("import os\nos.abort()\n", r"Importing .* ended its process: .*exit code -6"),
    ],
)
def test_a_module_that_runs_away_while_it_is_imported_is_refused(tmp_path, code, problem):
    (tmp_path / "hangs.py").write_text(code)
    settings: dict[str, Any] = {"import_timeout_s": 1.0 if "while" in code else GENEROUS_S, "memory_gb": 2}
    with pytest.raises(PluginError, match=problem):
        FunctionReward(FunctionRewardConfig(path=f"{tmp_path}/hangs.py:f", **settings))


def test_mistakes_are_found_at_the_start_and_told_as_in_the_runs_own_process(tmp_path):
    file = tmp_path / "mistaken.py"
    file.write_text("def two(prompt, response): ...\n")
    for path in (f"{file}:two", f"{file}:tow", f"{tmp_path}/nowhere.py:f"):
        told = []
        for in_process in (True, False):
            with pytest.raises((ConfigError, PluginError)) as caught:
                FunctionReward(FunctionRewardConfig(path=path, in_process=in_process))
            told.append((type(caught.value), str(caught.value)))
        assert told[0] == told[1]


# Pools of other functions


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[KillablePool]:
    """A pool of one worker for the function of tests/support/reward_functions.py that the test is parametrized with."""
    function, timeout_s = request.param
    pool = KillablePool(f"reward_functions:{function}", timeout_s)
    yield pool
    pool.close()


def called(pool: KillablePool, *arguments: Any) -> Any:
    return run(pool.call_async(*arguments))


@pytest.mark.parametrize("pool", [("spins", 0.2)], indirect=True)
def test_a_call_that_never_lets_go_of_the_interpreter_is_killed_too(pool):
    with pytest.raises(TookTooLong):
        called(pool)


@pytest.mark.parametrize("pool", [("process_ids", GENEROUS_S)], indirect=True)
@pytest.mark.parametrize("victim", ["worker", "supervisor"])
def test_a_process_that_is_killed_between_calls_is_replaced(pool, victim):
    worker, supervisor = called(pool)
    os.kill(worker if victim == "worker" else supervisor, signal.SIGKILL)
    wait_until_dead(worker)
    for _ in range(3):
        # Calls may come before the death is seen.
        with suppress(AttemptFailedError):
            called(pool)
    assert called(pool)[0] != worker


@pytest.mark.parametrize("pool", [("sleeps", GENEROUS_S)], indirect=True)
def test_calls_that_wait_for_a_worker_are_taken_back_with_their_callers(pool):
    async def cancel_those_that_wait() -> list[float | BaseException]:
        first = asyncio.ensure_future(pool.call_async(0.3))
        await asyncio.sleep(0.05)
        waiting = [asyncio.ensure_future(pool.call_async(600)) for _ in range(20)]
        last = asyncio.ensure_future(pool.call_async(0))
        await asyncio.sleep(0.05)
        for call in waiting:
            call.cancel()
        return list(await asyncio.wait_for(asyncio.gather(first, last), GENEROUS_S / 2))

    assert run(cancel_those_that_wait()) == [0.3, 0]


@pytest.mark.parametrize("pool", [("sleeps", GENEROUS_S)], indirect=True)
def test_calls_fail_when_the_pool_is_closed_and_start_no_process(pool):
    async def close_while_waiting() -> None:
        assert await pool.call_async(0) == 0
        calls = [asyncio.ensure_future(pool.call_async(600)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(pool.close)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, RunFailedError)
            assert "is closed" in str(outcome)
        with pytest.raises(RunFailedError, match="is closed"):
            await pool.call_async(0)

    run(close_while_waiting())


def test_a_process_that_could_not_be_started_is_started_by_the_next_call(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    pool = KillablePool("reward_functions:sleeps", GENEROUS_S)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("spurline_concurrency.killable.ChildProcess", refuse)
            with pytest.raises(BlockingIOError):
                called(pool, 0)
        assert run(asyncio.wait_for(pool.call_async(0), GENEROUS_S)) == 0
    finally:
        pool.close()


def test_calls_fail_when_the_pool_is_closed_during_the_import():
    pool = KillablePool("reward_functions:sleeps", GENEROUS_S)

    async def close_at_once() -> None:
        call = asyncio.ensure_future(pool.call_async(0))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(pool.close)
        with pytest.raises(RunFailedError, match="is closed"):
            await call

    run(close_at_once())
