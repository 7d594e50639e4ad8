"""Whole runs in which engines and trainer take turns on the same devices."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_every_prompt_ended_once
from child_engines import engines_of, shared_memory_of
from run_helpers import assert_same_weights, deterministic, num_lines, read_metrics, wait_for
from warm_runs import WarmRuns

from spurline import Run, load_config
from spurline.errors import ConfigError, RunFailedError
from spurline.plugins.hookspecs import hookimpl
from spurline_models.local.backend import LocalBackend

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_children")]

WriteConfig = Callable[[dict[str, Any]], Path]


@pytest.fixture
def colocated_config(rl_config: dict[str, Any], spurline_chat_file: Path) -> dict[str, Any]:
    """A run that is synchronous and evaluates, with one child process on the trainer's device."""
    rl_config["plugins"] = ["async_rl"]
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["steps"] = 3
    rl_config["report"] = {"enabled": False}
    rl_config["source"] |= {
        "name": "async_rollouts",
        "max_staleness": 0,
        "record_groups": True,
        "held_out": {"max_prompts": 3, "success": {"reward": "early"}},
        "engine": {
            "name": "child_process",
            "placement": "colocated",
            "offload_trainer": True,
            "deterministic": True,
            "max_restarts": 50,
        },
    }
    return rl_config


def test_at_zero_staleness_it_equals_a_run_with_engines_apart_bit_for_bit(colocated_config: dict[str, Any]) -> None:
    colocated_config["evaluation"] = {"every_steps": 1}
    Run(load_config(colocated_config)).train()
    engine = {"name": "child_process", "deterministic": True}
    twin = {
        **colocated_config,
        "run_dir": f"{colocated_config['run_dir']}-apart",
        "source": {**colocated_config["source"], "engine": engine},
    }
    Run(load_config(twin)).train()
    lines, expected = (
        [
            {name: value for name, value in line.items() if not name.startswith(("sync/", "async/"))}
            for line in deterministic(read_metrics(config["run_dir"]))
        ]
        for config in (colocated_config, twin)
    )
    assert lines == expected
    assert_same_weights(Path(colocated_config["run_dir"]), Path(twin["run_dir"]))
    moved = read_metrics(colocated_config["run_dir"])
    assert all(line["time/to_engines"] > 0 < line["time/to_trainer"] and line["sync/bytes"] > 0 for line in moved)
    assert engines_of(os.getpid()) == []


class Meddler:
    """Uses the backend and the engines wherever a hook may, and kills the sleeping engine now and then."""

    def __init__(self, kill_after: Sequence[int]) -> None:
        self.kill_after = kill_after
        self.probed: list[dict[str, float]] = []
        self.synced: list[int] = []

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._run = run

    @hookimpl
    def on_step_start(self, step: int) -> None:
        self.probed.append(self._run.evaluate("probe"))

    @hookimpl
    def on_weights_synced(self, step: int) -> None:
        self.synced.append(step)

    @hookimpl
    def on_step_end(self, step: int) -> None:
        # The trainer has its memory back: weights can be read, and it is not refused.
        assert sum(tensor.float().abs().sum().item() for _, tensor in self._run.backend.named_weights()) > 0
        if step in self.kill_after:
            [engine] = engines_of(os.getpid())
            engine.send_signal(signal.SIGKILL)


def test_one_step_off_with_hooks_that_evaluate_and_an_engine_that_dies_asleep(
    colocated_config: dict[str, Any],
) -> None:
    colocated_config["source"] |= {"max_staleness": 1, "correction": "tis"}
    colocated_config["source"]["engine"]["offload_trainer"] = False
    colocated_config["steps"] = 4
    loaded = load_config(colocated_config)
    meddler = Meddler(kill_after=[2])
    loaded.host.attach(meddler, "meddler")
    assert Run(loaded).train().status == "finished"
    assert_every_prompt_ended_once(colocated_config)
    ages = [line["staleness/max"] for line in read_metrics(colocated_config["run_dir"])]
    assert max(ages) <= 1
    assert len(meddler.probed) == 4
    # The last for the evaluation at the end.
    assert meddler.synced == [1, 2, 3, 4]
    assert engines_of(os.getpid()) == []


def test_a_trainer_that_does_not_get_its_memory_back_ends_the_run_and_leaves_no_engine(
    colocated_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = LocalBackend.take_device
    calls: list[int] = []

    def take_twice(backend: LocalBackend) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise RunFailedError("the memory is not there")
        take(backend)

    monkeypatch.setattr(LocalBackend, "take_device", take_twice)
    colocated_config["steps"] = 4
    with pytest.raises(RunFailedError, match="the memory is not there"):
        Run(load_config(colocated_config)).train()
    assert engines_of(os.getpid()) == []
    monkeypatch.undo()
    # The step before was saved in spite of it, and the run goes on from there.
    assert num_lines(Path(colocated_config["run_dir"]) / "metrics.jsonl") == 1
    assert Run(load_config(colocated_config)).train().step == 4
    assert_every_prompt_ended_once(colocated_config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 2, "correction": "tis"}, "max_staleness is 2, but with engine.placement: colocated"),
        (
            {"max_staleness": 1, "correction": "tis", "publish_every": 2},
            "publish_every is 2, but with engine.placement: colocated",
        ),
        (
            {"engine": {"name": "child_process", "offload_trainer": True}},
            "offload_trainer is true, but engines and trainer do not share devices. Set placement: colocated",
        ),
        (
            {"engine": {"name": "child_process", "placement": "ray"}},
            "placement is ray, and engine child_process starts processes on this machine alone",
        ),
        (
            {"engine": {"name": "vllm", "placement": "colocated", "kv_cache": "keep"}},
            "kv_cache is keep, but with placement: colocated",
        ),
        (
            {"engine": {"name": "vllm", "mode": "server", "urls": ["http://x"], "placement": "colocated"}},
            "placement is a setting of the server in mode: server",
        ),
    ],
)
def test_what_cannot_take_turns_is_refused_with_what_to_do(
    colocated_config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    colocated_config["source"] |= changes
    with pytest.raises(ConfigError) as raised:
        load_config(colocated_config)
    assert message in str(raised.value)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="kills many runs; SPURLINE_SOAK=1")
@pytest.mark.timeout(1800)
def test_a_controller_killed_again_and_again_in_any_phase_loses_no_prompt(
    colocated_config: dict[str, Any], write_config: WriteConfig, warm_runs: WarmRuns
) -> None:
    kills = 5
    colocated_config["source"] |= {"max_staleness": 1, "correction": "tis"}
    colocated_config |= {"steps": 10 * kills, "checkpoint": {"every_steps": 3}}
    path = write_config(colocated_config)
    instants = random.Random(11)
    metrics = Path(colocated_config["run_dir"]) / "metrics.jsonl"
    for _ in range(kills):
        before, steps = num_lines(metrics), instants.randint(1, 4)
        controller = warm_runs.start("train", path)
        wait_for(lambda: abs(num_lines(metrics) - before) >= steps, f"{steps} steps after the start")  # noqa: B023
        time.sleep(instants.uniform(0, 0.3))
        assert controller.poll() is None, "the run ended before it could be killed"
        controller.kill()
        controller.wait(10)
        wait_for(lambda: not engines_of(controller.pid), "the engines of the killed controller to end")  # noqa: B023
        wait_for(lambda: not shared_memory_of(controller.pid), "the killed controller's shared memory to go")  # noqa: B023
    assert Run(load_config(path)).train().status == "finished"
    assert_every_prompt_ended_once(colocated_config)
