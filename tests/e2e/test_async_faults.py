"""Failing environments, publishes and engines: every prompt still ends exactly once. See also `test_async_kills`."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_runs import assert_equals_synchronous, assert_every_prompt_ended_once, asynchronous
from child_engines import engines_of, shared_memory_of
from reward_functions import in_process
from run_helpers import Config, at, read_metrics, train, wait_for

from spurline.errors import RunFailedError
from spurline.protocols.backend import Backend
from spurline_async_rl.scheduling.scheduler import State
from spurline_async_rl.source.source import AsyncRolloutSource
from spurline_async_rl.weights.buckets import InProcessSync
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.draws import row_of
from spurline_rl.kept_rollouts import KeptRollouts
from spurline_rl.trajectory import turns_of

pytestmark = pytest.mark.processes

FAULTY_REWARDS = '''
import asyncio, os, random

async def fails_and_hangs(answer):
    """Raises for 5 % of the attempts and hangs for 1 %, whatever it did before."""
    fate = random.Random(os.urandom(8)).random()
    if fate < 0.05:
        raise ConnectionError("the sandbox is gone")
    if fate < 0.06:
        await asyncio.sleep(3600)
    letters = [letter for letter in answer.response.lower() if letter.isalpha()]
    return sum(letter < "n" for letter in letters) / max(1, len(letters))
'''


@pytest.fixture
def faulty_config(rl_config: Config, tmp_path: Path) -> Config:
    """An asynchronous run whose reward raises at 5 % and hangs at 1 % of the attempts, retried once."""
    (tmp_path / "modules" / "faulty_rewards.py").write_text(FAULTY_REWARDS, encoding="utf-8")
    return asynchronous(
        rl_config | {"report": {"enabled": False}},
        max_staleness=2,
        correction="tis",
        max_concurrent_groups=6,
        environment={"name": "single_turn", "rewards": {"early": in_process("faulty_rewards:fails_and_hangs")}},
        reward_weights={},
        engine="in_process",
        faults={"retries": 1, "attempt_timeout_s": 2.0, "max_quarantined": 64},
    )


def test_environments_that_raise_and_hang_cost_prompts_but_lose_none(faulty_config: Config) -> None:
    faulty_config["source"]["faults"]["retries"] = 0
    faulty_config["steps"] = 12
    run = train(faulty_config)
    given_up = assert_every_prompt_ended_once(faulty_config).in_state(State.GIVEN_UP)
    assert given_up, "no attempt failed"
    reasons = json.loads((run.run_dir / "summary.json").read_text(encoding="utf-8"))["given_up"]
    # A row that fails again in a later epoch is the same loss.
    rows = {row_of(lost.uid) for lost in KeptRollouts(run.run_dir).given_up()}
    assert len(rows) <= len(reasons) <= len(given_up)
    assert all("the sandbox is gone" in reason or "did not end within 2 s" in reason for reason in reasons)


class _FailsOnce(InProcessSync):
    """Breaks off in the middle of the publish of version 4, or hangs there."""

    hangs = False

    def make_buckets(self, version: int, backend: Backend, *how: Any) -> Iterator[WeightBucket]:
        buckets = super().make_buckets(version, backend, *how)
        if version != 4:
            yield from buckets
            return
        yield next(buckets)
        if self.hangs:
            time.sleep(5)
        raise OSError("the link is down")


class _HangsOnce(_FailsOnce):
    hangs = True


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_FailsOnce, r"weights of version 4 over in_process failed: OSError: the link is down"),
        (_HangsOnce, r"version 4 over in_process did not end within 3 s"),
    ],
)
def test_nothing_is_trained_after_a_failed_publish_and_a_resume_goes_on_from_the_checkpoint(
    faulty_config: Config, monkeypatch: pytest.MonkeyPatch, broken: type, message: str
) -> None:
    faulty_config |= {"checkpoint": {"every_steps": 1}, "steps": 8}
    faulty_config["source"]["weight_sync"] = {"name": "in_process", "bucket_mb": 1, "timeout_s": 3.0}
    with monkeypatch.context() as patch:
        patch.setattr("spurline_async_rl.weights.buckets.InProcessSync", broken)
        with pytest.raises(RunFailedError, match=message):
            train(faulty_config)
    assert len(read_metrics(faulty_config["run_dir"])) == 3, "the step whose publish failed is not done"
    assert train(faulty_config).status == "finished"
    assert_every_prompt_ended_once(faulty_config)


@pytest.fixture
def child_config(rl_config: Config) -> Config:
    """An asynchronous run with two child processes."""
    return asynchronous(
        rl_config | {"report": {"enabled": False}},
        correction="tis",
        max_concurrent_groups=4,
        engine={"name": "child_process", "engines": 2, "max_restarts": 1000},
    )


def test_engines_in_other_processes_at_zero_staleness_equal_the_synchronous_run_bit_for_bit(
    child_config: Config,
) -> None:
    del child_config["source"]["correction"]
    child_config["steps"] = 3
    child_config["source"]["engine"]["deterministic"] = True
    assert_equals_synchronous(child_config)
    assert engines_of(os.getpid()) == []
    gc.collect()
    assert shared_memory_of(os.getpid()) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engines_killed_again_and_again_are_replaced_and_every_prompt_is_trained_on_once(child_config: Config) -> None:
    kills = 20 if os.environ.get("SPURLINE_SOAK") else 2
    child_config |= {"steps": 6 * kills + 4, "checkpoint": {"every_steps": 1000}}
    instants = random.Random(3)
    killed: list[int] = []
    killers: list[threading.Timer] = []

    def living() -> list[psutil.Process]:
        return [process for process in engines_of(os.getpid()) if process.pid not in killed]

    def kill_an_engine() -> None:
        victim = instants.choice(living())
        killed.append(victim.pid)
        victim.send_signal(signal.SIGKILL)

    def kill_while_steps_go_on(step: int) -> None:
        """Kill one every six steps, when both are there; it dies at some instant of the steps that follow."""
        if step % 6 == 1:
            for killer in killers:
                killer.join()
            wait_for(lambda: len(living()) == 2, "engines in place of those that were killed", 60)
            if step < 6 * kills:
                killers.append(threading.Timer(instants.uniform(0, 0.3), kill_an_engine))
                killers[-1].start()

    train(child_config, on_step_end=kill_while_steps_go_on)
    assert len(killed) == kills
    assert_every_prompt_ended_once(child_config)
    assert engines_of(os.getpid()) == []


def test_a_stalled_run_names_the_engine_that_holds_a_request(
    child_config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    # With more, finished groups would be trained on first, and it is the next publish that would wait.
    child_config["source"] |= {"max_staleness": 0, "watchdog_s": 1.0, "stall_timeout_s": 3.0}
    child_config["source"]["engine"] |= {"engines": 1, "close_timeout_s": 2.0}
    # Long answers, so that the engine still makes them when it is stopped, on a busy machine too.
    child_config["source"]["sampling"]["max_new_tokens"] = 60
    stopped: list[int] = []

    def stop_engines() -> None:
        for process in engines_of(os.getpid()):
            process.suspend()
            stopped.append(process.pid)

    with pytest.raises(RunFailedError, match=r"No group has ended for"):
        train(child_config, on_weights_synced=at(3, stop_engines))
    [pid] = stopped
    err = capfd.readouterr().err
    assert "sample 0 turn 0: asked" in err
    assert f"with engine 0 (process {pid})" in err
    assert engines_of(os.getpid()) == []


def test_an_engine_that_dies_during_an_evaluation_gets_the_weights_and_finishes_it_with_trusted_answers(
    child_config: Config, spurline_chat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child_config["data"]["eval"] = str(spurline_chat_file)
    child_config["evaluation"] = {"every_steps": 3}
    child_config["source"]["engine"]["engines"] = 1
    child_config["source"] |= {"held_out": {"max_prompts": 8}, "reward_weights": {}}
    child_config["source"]["environment"]["rewards"] = {"early": in_process("run_rewards:early_letters")}
    killed: list[int] = []

    def kill() -> None:
        for process in engines_of(os.getpid()):
            killed.append(process.pid)
            process.kill()

    evaluate, asked = AsyncRolloutSource._evaluate, list[int]()

    def distrust_first(self: Any, prompts: Any, held_out: Any, *more: Any) -> Any:
        outcomes = evaluate(self, prompts, held_out, *more)
        [engine] = {turn.engines[-1] for turn in turns_of(outcomes)}
        asked.append(len(prompts))
        change = self._producer.distrust if len(asked) == 1 else self._producer.trust
        self._loop.submit(change, engine, len(asked) - 2).result(60)
        return outcomes

    monkeypatch.setattr(AsyncRolloutSource, "_evaluate", distrust_first)
    # Step 3 is evaluated right after its weights were published.
    run = train(child_config, on_weights_synced=at(3, kill))
    assert killed
    assert asked == [8, 8, 8]
    evaluated = [line for line in run.lines if "eval/reward" in line]
    assert [line["step"] for line in evaluated] == [3, 6]
    assert all("eval/failed" not in line for line in evaluated)
    assert_every_prompt_ended_once(child_config)
