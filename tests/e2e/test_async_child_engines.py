"""Whole asynchronous runs with engines in processes of their own: exact, and alive after any of them is killed."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_runs import assert_every_prompt_ended_once
from child_engines import engines_of, shared_memory_of
from reward_functions import in_process
from run_helpers import assert_same_weights, deterministic, read_metrics, wait_for

from spurline import Run, load_config
from spurline.errors import RunFailedError
from spurline.plugins.hookspecs import hookimpl

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_children")]


@pytest.fixture
def child_config(rl_config: dict[str, Any]) -> dict[str, Any]:
    """An asynchronous run with two child processes."""
    rl_config["plugins"] = ["async_rl"]
    rl_config["report"] = {"enabled": False}
    rl_config["source"] |= {
        "name": "async_rollouts",
        "correction": "tis",
        "record_groups": True,
        "max_concurrent_groups": 4,
        "engine": {"name": "child_process", "engines": 2, "max_restarts": 1000},
    }
    return rl_config


def test_engines_in_other_processes_at_zero_staleness_equal_the_synchronous_run_bit_for_bit(
    child_config: dict[str, Any],
) -> None:
    source = child_config["source"]
    del source["correction"]
    source["engine"]["deterministic"] = True
    source["max_staleness"] = 0
    Run(load_config(child_config)).train()
    kept = ("name", "max_staleness", "record_groups", "max_concurrent_groups", "engine")
    twin = {
        **child_config,
        "plugins": [],
        "run_dir": f"{child_config['run_dir']}-synchronous",
        "source": {
            **{name: value for name, value in source.items() if name not in kept},
            "name": "rollouts",
            "engine": {"name": "in_process", "deterministic": True},
        },
    }
    Run(load_config(twin)).train()
    expected = deterministic(read_metrics(twin["run_dir"]))
    lines = deterministic(read_metrics(child_config["run_dir"]))
    assert [{name: line[name] for name in other} for line, other in zip(lines, expected, strict=True)] == expected
    assert_same_weights(Path(child_config["run_dir"]), Path(twin["run_dir"]))
    assert engines_of(os.getpid()) == []
    gc.collect()
    assert shared_memory_of(os.getpid()) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engines_killed_again_and_again_are_replaced_and_every_prompt_is_trained_on_once(
    child_config: dict[str, Any],
) -> None:
    kills = 20 if os.environ.get("SPURLINE_SOAK") else 2
    child_config["steps"] = 10 * kills + 4
    child_config["checkpoint"] = {"every_steps": 1000}
    instants = random.Random(3)
    killed: list[int] = []

    def living() -> list[psutil.Process]:
        return [process for process in engines_of(os.getpid()) if process.pid not in killed]

    def kill_an_engine() -> None:
        victim = instants.choice(living())
        killed.append(victim.pid)
        victim.send_signal(signal.SIGKILL)

    class KillWhileStepsGoOn:
        """Every ten steps one, when both are there; it dies at some instant of the steps that follow."""

        killer = threading.Timer(0, kill_an_engine)

        @hookimpl
        def on_step_end(self, step: int) -> None:
            if step % 10 != 1:
                return
            if step > 1:
                self.killer.join()
            wait_for(lambda: len(living()) == 2, "engines in place of those that were killed", 60)
            if step < 10 * kills:
                self.killer = threading.Timer(instants.uniform(0, 0.3), kill_an_engine)
                self.killer.start()

    loaded = load_config(child_config)
    loaded.host.attach(KillWhileStepsGoOn(), "kill-while-steps-go-on")
    Run(loaded).train()
    assert len(killed) == kills
    assert_every_prompt_ended_once(child_config)
    assert engines_of(os.getpid()) == []


def test_a_stalled_run_names_the_engine_that_holds_a_request(
    child_config: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    # With more, finished groups would be trained on first, and it is the next publish that would wait.
    child_config["source"] |= {"max_staleness": 0, "watchdog_s": 1.0, "stall_timeout_s": 3.0}
    child_config["source"]["engine"] |= {"engines": 1, "close_timeout_s": 2.0}
    # Long answers, so that the engine still makes them when it is stopped, on a busy machine too.
    child_config["source"]["sampling"]["max_new_tokens"] = 60
    stopped: list[psutil.Process] = []

    def stop_engines(*_: object) -> None:
        for process in engines_of(os.getpid()):
            process.suspend()
            stopped.append(process)

    class StopAfterStep3:
        @hookimpl
        def on_weights_synced(self, step: int) -> None:
            if step == 3:
                stop_engines()

    loaded = load_config(child_config)
    loaded.host.attach(StopAfterStep3(), "stop-engines")
    with pytest.raises(RunFailedError, match=r"No group has ended for"):
        Run(loaded).train()
    assert len(stopped) == 1
    err = capfd.readouterr().err
    assert "sample 0 turn 0: asked" in err
    assert f"with engine 0 (process {stopped[0].pid})" in err
    assert engines_of(os.getpid()) == []


def test_an_engine_that_dies_during_an_evaluation_gets_the_weights_and_finishes_it(
    child_config: dict[str, Any], spurline_chat_file: Path
) -> None:
    child_config["data"]["eval"] = str(spurline_chat_file)
    child_config["evaluation"] = {"every_steps": 3}
    child_config["source"]["engine"]["engines"] = 1
    child_config["source"]["held_out"] = {"max_prompts": 8}
    child_config["source"]["environment"]["rewards"] = {"early": in_process("run_rewards:early_letters")}
    child_config["source"]["reward_weights"] = {}
    killed: list[int] = []

    class KillAsTheEvaluationBegins:
        @hookimpl
        def on_weights_synced(self, step: int) -> None:
            # Step 3 is evaluated right after its weights were published.
            if step == 3:
                for process in engines_of(os.getpid()):
                    killed.append(process.pid)
                    process.kill()

    loaded = load_config(child_config)
    loaded.host.attach(KillAsTheEvaluationBegins(), "kill-engine")
    Run(loaded).train()
    assert killed
    evaluated = [line for line in read_metrics(child_config["run_dir"]) if "eval/reward" in line]
    assert [line["step"] for line in evaluated] == [3, 6]
    assert all("eval/failed" not in line for line in evaluated)
    assert_every_prompt_ended_once(child_config)
