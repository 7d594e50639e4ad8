"""Whole runs in which engines and trainer take turns on the same devices."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from async_runs import assert_every_prompt_ended_once, asynchronous, comparable
from child_engines import engines_of
from run_helpers import Config, assert_problem, assert_same_weights, read_metrics, train

from spurline import Run, load_config
from spurline.errors import ConfigError, RunFailedError
from spurline.plugins.hookspecs import hookimpl
from spurline_models.local.backend import LocalBackend

pytestmark = pytest.mark.processes


@pytest.fixture
def colocated_config(rl_config: Config, spurline_chat_file: Path) -> Config:
    """A run that is synchronous and evaluates, with one child process on the trainer's device."""
    rl_config["data"]["eval"] = str(spurline_chat_file)
    return asynchronous(
        rl_config | {"steps": 3, "report": {"enabled": False}},
        max_staleness=0,
        held_out={"max_prompts": 3, "success": {"reward": "early"}},
        engine={
            "name": "child_process",
            "placement": "colocated",
            "offload_trainer": True,
            "deterministic": True,
            "max_restarts": 50,
        },
    )


def test_at_zero_staleness_it_equals_a_run_with_engines_apart_bit_for_bit(colocated_config: Config) -> None:
    colocated_config["evaluation"] = {"every_steps": 1}
    run = train(colocated_config)
    engine = {"name": "child_process", "deterministic": True}
    apart = train(colocated_config, name="apart", source=colocated_config["source"] | {"engine": engine})
    assert comparable(run) == comparable(apart)
    assert_same_weights(run, apart)
    for line in run.lines:
        assert min(line[name] for name in ("time/to_engines", "time/to_trainer", "sync/bytes")) > 0
    assert engines_of(os.getpid()) == []


class Meddler:
    """Uses the backend and the engines wherever a hook may, and kills the sleeping engine after step 2."""

    def __init__(self) -> None:
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
        if step == 2:
            [engine] = engines_of(os.getpid())
            engine.send_signal(signal.SIGKILL)


def test_one_step_off_with_hooks_that_evaluate_and_an_engine_that_dies_asleep(colocated_config: Config) -> None:
    colocated_config["source"] |= {"max_staleness": 1, "correction": "tis"}
    colocated_config["source"]["engine"]["offload_trainer"] = False
    colocated_config["steps"] = 4
    meddler = Meddler()
    run = train(colocated_config, meddler)
    assert_every_prompt_ended_once(colocated_config)
    assert max(line["staleness/max"] for line in run.lines) <= 1
    assert len(meddler.probed) == 4
    # The last for the evaluation at the end.
    assert meddler.synced == [1, 2, 3, 4]
    assert engines_of(os.getpid()) == []


def test_a_trainer_that_does_not_get_its_memory_back_ends_the_run_and_leaves_no_engine(
    colocated_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, calls = LocalBackend.take_device, []

    def take_twice(backend: LocalBackend) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise RunFailedError("the memory is not there")
        take(backend)

    monkeypatch.setattr(LocalBackend, "take_device", take_twice)
    colocated_config["steps"] = 4
    with pytest.raises(RunFailedError, match="the memory is not there"):
        train(colocated_config)
    assert engines_of(os.getpid()) == []
    monkeypatch.undo()
    # The step before was saved in spite of it, and the run goes on from there.
    assert len(read_metrics(colocated_config["run_dir"])) == 1
    assert train(colocated_config).step == 4
    assert_every_prompt_ended_once(colocated_config)


CHILD = {"name": "child_process"}
VLLM = {"name": "vllm", "placement": "colocated"}


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"engine": CHILD | {"offload_trainer": True}}, "engine.offload_trainer", "Set placement: colocated"),
        ({"engine": VLLM, "max_staleness": 2, "correction": "tis"}, "max_staleness", "take turns"),
        ({"engine": VLLM, "max_staleness": 1, "publish_every": 2, "correction": "tis"}, "publish_every", "take turns"),
        ({"engine": CHILD | {"placement": "ray"}}, "engine.placement", "only on this machine"),
        ({"engine": VLLM | {"kv_cache": "keep"}}, "engine.kv_cache", "placement: colocated"),
        ({"engine": VLLM | {"mode": "server", "urls": ["http://x"]}}, "engine.placement", "mode: server"),
    ],
)
def test_what_cannot_take_turns_is_refused_with_what_to_do(
    colocated_config: Config, changes: Config, key: str, fix: str
) -> None:
    colocated_config["source"] |= changes
    with pytest.raises(ConfigError) as caught:
        load_config(colocated_config)
    assert_problem(caught, key=f"source.{key}", fix=fix)
