"""What a finished asynchronous run must have left behind, and reward functions that fail now and then."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from run_helpers import read_metrics

from spurline.run.checkpoint import read_state
from spurline_async_rl.scheduling.scheduler import Scheduler, SchedulerLimits, State
from spurline_async_rl.source.recordings import groups_of, recorded_step

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
        groups = groups_of(read_state(recorded_step(run_dir, step)))
        assert len(groups) == config["source"]["prompts_per_step"]
        for group in groups:
            assert group.draw not in recorded, f"draw {group.draw} was trained at {recorded[group.draw]} and {step}"
            recorded[group.draw] = step
    assert recorded == scheduler.trained()
    untrained = [*scheduler.in_state(State.FILTERED), *scheduler.in_state(State.GIVEN_UP)]
    assert Counter([*recorded, *untrained]) == dict.fromkeys(range(scheduler.num_drawn), 1)
    return scheduler


def reasons_of_given_up(run_dir: Path) -> list[str]:
    """Why prompts were given up, as the run's summary has it."""
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["given_up"]
