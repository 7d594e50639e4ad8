"""Worker processes that can be killed, and the reward `math_verify` in them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from rl_attempts import run

from spurline.errors import ConfigError, DataError, PluginError, RunFailedError
from spurline_rl.concurrency import in_thread
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import MathVerifyConfig
from spurline_rl.rewards.killable import KillablePool, TookTooLong
from spurline_rl.rewards.math_verify import MathVerify
from spurline_rl.scoring import reward_terms

GENEROUS_S = 60.0


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[KillablePool]:
    """A pool of one worker for the function of tests/support/reward_functions.py that the test is parametrized with."""
    function, timeout_s = request.param
    worker = KillablePool(f"reward_functions:{function}", timeout_s)
    yield worker
    worker.close()


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_dead(process_id: int) -> None:
    deadline = time.monotonic() + 30
    while is_alive(process_id):
        assert time.monotonic() < deadline, f"process {process_id} is still alive"
        time.sleep(0.01)


@pytest.mark.processes
@pytest.mark.parametrize("worker", [("process_id", GENEROUS_S)], indirect=True)
def test_calls_are_made_in_one_other_process_until_it_is_closed(worker):
    process_id = worker.call()
    assert process_id != os.getpid()
    assert worker.call() == process_id
    worker.close()
    assert not is_alive(process_id)


@pytest.mark.processes
@pytest.mark.parametrize("worker", [("spins", 0.2)], indirect=True)
def test_a_call_that_never_lets_go_of_the_interpreter_is_killed_too(worker):
    with pytest.raises(TookTooLong):
        worker.call()


@pytest.mark.processes
@pytest.mark.parametrize("worker", [("dies", GENEROUS_S)], indirect=True)
def test_a_worker_that_dies_is_reported_with_its_last_words_and_replaced(worker):
    for _ in range(2):
        with pytest.raises(AttemptFailedError, match=r"(?s)worker process of .*:dies died: exit code -6\..*giving up"):
            worker.call()


@pytest.mark.processes
@pytest.mark.parametrize("worker", [("exits_instead", GENEROUS_S)], indirect=True)
def test_a_function_that_exits_has_failed(worker):
    with pytest.raises(AttemptFailedError, match="reward_functions:exits_instead failed: SystemExit: 2"):
        worker.call()


@pytest.mark.processes
@pytest.mark.parametrize("worker", [("gives_back_a_set", GENEROUS_S)], indirect=True)
def test_a_result_that_is_not_json_is_the_functions_failure(worker):
    with pytest.raises(AttemptFailedError, match="gives_back_a_set failed: TypeError: Object of type set is not JSON"):
        worker.call()


@pytest.mark.processes
@pytest.mark.parametrize("worker", [("process_ids", GENEROUS_S)], indirect=True)
@pytest.mark.parametrize("victim", ["worker", "pool"])
def test_a_process_that_is_killed_between_calls_is_replaced(worker, victim):
    process, pool = worker.call()
    os.kill(process if victim == "worker" else pool, signal.SIGKILL)
    wait_until_dead(process)
    for _ in range(3):
        # Calls may come before the death is seen.
        with suppress(AttemptFailedError):
            worker.call()
    assert worker.call()[0] != process


@pytest.mark.processes
@pytest.mark.parametrize("worker", [("missing", GENEROUS_S)], indirect=True)
def test_a_function_that_cannot_be_imported_is_a_plugin_error(worker):
    with pytest.raises(PluginError, match="cannot import reward_functions:missing: AttributeError"):
        worker.call()


@pytest.mark.processes
def test_a_pool_serves_more_callers_than_it_has_workers():
    pool = KillablePool("reward_functions:process_id", GENEROUS_S, workers=2)

    async def many() -> list[int]:
        return list(await asyncio.gather(*(in_thread(pool.call) for _ in range(20))))

    try:
        assert 1 <= len(set(run(many()))) <= 2
    finally:
        pool.close()
    with pytest.raises(RunFailedError, match="is closed"):
        pool.call()


@pytest.mark.processes
def test_calls_that_wait_for_a_worker_are_taken_back_with_their_callers():
    pool = KillablePool("reward_functions:sleeps", GENEROUS_S, workers=1)

    async def cancel_those_that_wait() -> list[float | BaseException]:
        first = asyncio.ensure_future(pool.call_async(0.3))
        await asyncio.sleep(0.05)
        waiting = [asyncio.ensure_future(pool.call_async(600)) for _ in range(20)]
        last = asyncio.ensure_future(pool.call_async(0))
        await asyncio.sleep(0.05)
        for call in waiting:
            call.cancel()
        return list(await asyncio.wait_for(asyncio.gather(first, last), GENEROUS_S / 2))

    try:
        assert run(cancel_those_that_wait()) == [0.3, 0]
    finally:
        pool.close()


@pytest.mark.processes
def test_a_call_that_waited_for_a_worker_while_the_pool_was_closed_starts_no_process():
    pool = KillablePool("reward_functions:sleeps", GENEROUS_S, workers=1)

    async def close_while_waiting() -> None:
        assert await in_thread(pool.call, 0) == 0
        calls = [asyncio.ensure_future(in_thread(pool.call, 600)) for _ in range(2)]
        await asyncio.sleep(0.1)
        pool.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert any("is closed" in str(outcome) for outcome in outcomes)
        assert all(isinstance(outcome, AttemptFailedError | RunFailedError) for outcome in outcomes)

    run(close_while_waiting())
    assert pool._child is None


def test_without_the_library_the_reward_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the math-verify library.*pip install 'spurline-rl\[math\]'"):
        MathVerify(MathVerifyConfig())


@pytest.fixture
def math_reward() -> Iterator[MathVerify]:
    pytest.importorskip("math_verify")
    reward = MathVerify(MathVerifyConfig(timeout_s=GENEROUS_S))
    yield reward
    reward.close()


@pytest.mark.slow
def test_answers_are_compared_as_mathematics(math_reward):
    cases = [("1/2", "so it is \\boxed{0.5}", 1), ("\\frac{1}{2}", "$\\frac{2}{4}$", 1), ("42", "The answer is 42.", 1)]
    cases += [("42", "The answer is 41.", 0), ("x^2", "", 0), ("$(1, 2)$", "$(1,2)$", 1)]
    for reference, response, expected in cases:
        answer = Answer("", response, reference, {})
        assert run(reward_terms({"math": math_reward}, answer)) == {"math": expected}, (reference, response)


@pytest.mark.slow
def test_a_reference_without_mathematics_is_the_datas_fault(math_reward):
    with pytest.raises(DataError, match="finds no mathematics in the reference ''"):
        math_reward.score(Answer("", "42", "", {}))
    with pytest.raises(DataError, match="needs a reference"):
        math_reward.score(Answer("", "42", None, {}))


@pytest.mark.processes
def test_an_answer_that_cannot_be_checked_in_time_is_wrong(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    reward = MathVerify(MathVerifyConfig())
    reward._pool = KillablePool("reward_functions:compares_for_ever", 0.2, workers=1)
    try:
        assert reward.score(Answer("", "10^10^10", "1", {})) == 0.0
    finally:
        reward.close()
