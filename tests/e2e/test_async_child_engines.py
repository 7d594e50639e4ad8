"""Whole asynchronous runs with engines in processes of their own: exact, and alive after any of them is killed."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from pathlib import Path

import psutil
import pytest
from async_runs import assert_equals_synchronous, assert_every_prompt_ended_once, asynchronous
from child_engines import engines_of, shared_memory_of
from reward_functions import in_process
from run_helpers import Config, at, train, wait_for

from spurline.errors import RunFailedError

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_children")]


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
    child_config["source"]["engine"]["deterministic"] = True
    assert_equals_synchronous(child_config)
    assert engines_of(os.getpid()) == []
    gc.collect()
    assert shared_memory_of(os.getpid()) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engines_killed_again_and_again_are_replaced_and_every_prompt_is_trained_on_once(child_config: Config) -> None:
    kills = 20 if os.environ.get("SPURLINE_SOAK") else 2
    child_config |= {"steps": 10 * kills + 4, "checkpoint": {"every_steps": 1000}}
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
        """Kill one every ten steps, when both are there; it dies at some instant of the steps that follow."""
        if step % 10 == 1:
            for killer in killers:
                killer.join()
            wait_for(lambda: len(living()) == 2, "engines in place of those that were killed", 60)
            if step < 10 * kills:
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


def test_an_engine_that_dies_during_an_evaluation_gets_the_weights_and_finishes_it(
    child_config: Config, spurline_chat_file: Path
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

    # Step 3 is evaluated right after its weights were published.
    run = train(child_config, on_weights_synced=at(3, kill))
    assert killed
    evaluated = [line for line in run.lines if "eval/reward" in line]
    assert [line["step"] for line in evaluated] == [3, 6]
    assert all("eval/failed" not in line for line in evaluated)
    assert_every_prompt_ended_once(child_config)
