"""What asynchronous runs must do and leave behind, on one process and on ranks, and reward functions that fail now and
then."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from living_processes import living_below
from run_helpers import deterministic, read_metrics

from spurline import Run, load_config
from spurline.run.checkpoints.state_files import read_state
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State
from spurline_async_rl.source.recordings import groups_of, recorded_step
from spurline_rl.kept_rollouts import KeptRollouts

FAULTY_REWARDS = '''
import asyncio, os, random

async def fails_and_hangs(answer):
    """Raises for 5 % of the attempts and hangs for 1 %, each time anew."""
    fate = random.Random(os.urandom(8)).random()
    if fate < 0.05:
        raise ConnectionError("the sandbox is gone")
    if fate < 0.06:
        await asyncio.sleep(3600)
    letters = [letter for letter in answer.response.lower() if letter.isalpha()]
    return sum(letter < "n" for letter in letters) / max(1, len(letters))
'''


def newest_scheduler(run_dir: Path) -> Scheduler:
    """The scheduler as the run's last checkpoint has it, with the knobs of another run."""
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    scheduler = Scheduler(SchedulerLimits(0, 1, 1, "fifo", "wait", 1, 1))
    scheduler.load_state_dict(read_state(newest / "components" / "source" / "async_rollouts"))
    return scheduler


def assert_every_prompt_ended_once(config: dict[str, Any]) -> Scheduler:
    """Each step has its line, its groups, and each prompt that was drawn ended exactly once. Needs `record_groups`."""
    run_dir, steps = Path(config["run_dir"]), config["steps"]
    assert [line["step"] for line in read_metrics(run_dir)] == list(range(1, steps + 1))
    scheduler = newest_scheduler(run_dir)
    counts = scheduler.counts()
    assert {name: counts[name] for name in ("pending", "running", "buffered")} == dict.fromkeys(
        ("pending", "running", "buffered"), 0
    )
    recorded: dict[int, int] = {}
    for step in range(1, steps + 1):
        groups = [*groups_of(read_state(recorded_step(run_dir, step)))]
        assert len(groups) == config["source"]["prompts_per_step"]
        for group in groups:
            assert group.draw not in recorded, f"draw {group.draw} was trained at {recorded[group.draw]} and {step}"
            recorded[group.draw] = step
    assert recorded == scheduler.trained()
    kept = {attempt.draw: attempt.step for attempt in KeptRollouts(run_dir).attempts() if attempt.status == "trained"}
    assert kept == recorded
    untrained = [*scheduler.in_state(State.FILTERED), *scheduler.in_state(State.GIVEN_UP)]
    assert Counter([*recorded, *untrained]) == dict.fromkeys(range(scheduler.num_drawn), 1)
    return scheduler


def reasons_of_given_up(run_dir: Path) -> list[str]:
    """Why prompts were given up, as the run's summary has it."""
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["given_up"]


def metrics_of(config: Mapping[str, Any], name: str, **changed: Any) -> list[dict[str, Any]]:
    """What a run of this config with these sections writes."""
    run_dir = f"{config['run_dir']}-{name}"
    Run(load_config({**config, "run_dir": run_dir, **changed})).train()
    return deterministic(read_metrics(run_dir))


def assert_metrics_close(
    lines: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]], tolerance: float
) -> None:
    """All metrics that both have are equal within this, relative to those above 1."""
    for line, other in zip(lines, expected, strict=True):
        common = [name for name in other if name in line]
        assert {"loss", "grad_norm", "reward/mean", "mismatch/logprob_diff/max"} <= set(common)
        far = {name: (line[name], other[name]) for name in common if not _close(line[name], other[name], tolerance)}
        assert not far, f"step {line['step']}: {far}"


def _close(value: Any, other: Any, tolerance: float) -> bool:
    return value == other or abs(value - other) <= tolerance * max(1.0, abs(other))


def ranks_of(controller: int) -> list[psutil.Process]:
    """Its ranks: forks of the process that it has started for them."""
    # A fork has the command line of the process that it was forked from.
    command = "spurline_ranks.rank_server"
    return [rank for server in living_below(controller, command) for rank in living_below(server.pid, command)]
