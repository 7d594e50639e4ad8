"""Asynchronous runs, their synchronous twins, and what both must do and leave behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from living_processes import living_below
from run_helpers import Config, Trained, assert_same_weights, deterministic, read_metrics, train
from schedule_driver import counts_of, trained_by

from spurline.run.checkpoints.state_files import read_state
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State
from spurline_async_rl.source.recordings import groups_of, recorded_step
from spurline_rl.kept_rollouts import KeptRollouts
from spurline_rl.trajectory import Group

IN_PROCESS = {"name": "in_process", "deterministic": True}
ONLY_ASYNC = ("max_staleness", "record_groups", "max_concurrent_groups", "weight_sync")
"""Settings that the synchronous source does not have."""


def asynchronous(config: Mapping[str, Any], **source: Any) -> Config:
    """The config with asynchronous rollouts, which are recorded, and with these settings of its source."""
    return {
        **config,
        "plugins": [*config.get("plugins", ()), "async_rl"],
        "source": {**config["source"], "name": "async_rollouts", "record_groups": True, **source},
    }


def synchronous(config: Mapping[str, Any]) -> Config:
    """The same run without asynchronous rollouts, and with an engine in its own process."""
    source = {name: value for name, value in config["source"].items() if name not in ONLY_ASYNC}
    shared = {name: source["engine"][name] for name in ("precision",) if name in source["engine"]}
    engine = source["engine"] if source["engine"]["name"] == "in_process" else {**IN_PROCESS, **shared}
    plugins = [name for name in config["plugins"] if name != "async_rl"]
    return {**config, "plugins": plugins, "source": {**source, "name": "rollouts", "engine": engine}}


def comparable(run: Trained | Path | str) -> list[dict[str, Any]]:
    """Return the metrics that asynchronous and synchronous runs have in common, without times."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("async/", "staleness/", "sync/"))}
        for line in deterministic(read_metrics(run))
    ]


def assert_equals_synchronous(config: Config) -> Trained:
    """Assert that the run without staleness equals its synchronous twin, bit for bit. Returns the run."""
    config["source"]["max_staleness"] = 0
    run, twin = train(config), train(synchronous(config), name="synchronous")
    assert comparable(run) == comparable(twin)
    assert_same_weights(run, twin)
    return run


def recorded_groups(config: Config) -> Iterator[tuple[int, Group]]:
    """Yield each group that the run has trained on, with its step."""
    for step in range(1, config["steps"] + 1):
        for group in groups_of(read_state(recorded_step(Path(config["run_dir"]), step))):
            yield step, group


def assert_every_prompt_ended_once(config: Config) -> Scheduler:
    """Assert that each step has its line and its groups, and that each drawn prompt ended exactly once.

    Returns the scheduler as the newest checkpoint has it, with the knobs of another run.
    """
    run_dir, steps = Path(config["run_dir"]), config["steps"]
    assert [line["step"] for line in read_metrics(run_dir)] == list(range(1, steps + 1))
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    scheduler = Scheduler(SchedulerLimits(0, 1, 1, "fifo", 1, 1))
    scheduler.load_state_dict(read_state(newest / "components" / "source" / "async_rollouts"))
    counts = counts_of(scheduler)
    assert [counts[name] for name in ("pending", "running", "buffered")] == [0, 0, 0]
    recorded: dict[int, int] = {}
    for step, group in recorded_groups(config):
        assert group.draw not in recorded, f"draw {group.draw} was trained at {recorded[group.draw]} and {step}"
        recorded[group.draw] = step
    assert recorded == trained_by(scheduler)
    assert set(Counter(recorded.values()).values()) == {config["source"]["prompts_per_step"]}
    kept = {attempt.draw: attempt.step for attempt in KeptRollouts(run_dir).attempts() if attempt.status == "trained"}
    assert kept == recorded
    untrained = [*scheduler.in_state(State.FILTERED), *scheduler.in_state(State.GIVEN_UP)]
    assert Counter([*recorded, *untrained]) == dict.fromkeys(range(scheduler.num_drawn), 1)
    return scheduler


def kept_attempts(run: Trained | str) -> list[Any]:
    """Return what a run has kept of each attempt, with its response."""
    return [
        (attempt.step, attempt.uid, attempt.sample, attempt.reward, attempt.advantage, attempt.turns[0].response_text)
        for attempt in KeptRollouts(run).attempts()
    ]


def ranks_of(controller: int) -> list[psutil.Process]:
    """Return the processes of the ranks."""
    return living_below(controller, "spurline_ranks.rank_main")
