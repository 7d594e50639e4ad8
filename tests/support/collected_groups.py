"""Groups of a step, collected by the synchronous source from draws whose fates a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spurline.config.run_config import DatasetConfig
from spurline_rl.draws import Draw, SkippedRow
from spurline_rl.group_runner import GivenUpPrompt, Outcome
from spurline_rl.prompt_source import Collected, collect_groups
from spurline_rl.trajectory import Group, Trajectory, Turn

VARIED, EQUAL, LOST = "varied", "equal", "lost"
BAD, UNREADABLE = "bad", "unreadable"
"""Rows that an attempt finds to be unusable, and rows that are so when they are drawn."""


def collect(
    outcomes: Sequence[str] | Callable[[int], str], rounds: list[int] | None = None, **settings: Any
) -> Collected:
    """Collect the groups of a step as the synchronous source does. outcomes: what becomes of each draw. rounds: gets
    the number of prompts asked for in each round."""
    fate = outcomes if callable(outcomes) else lambda number: outcomes[number]

    def take(start: int, count: int) -> list[Draw | SkippedRow]:
        if rounds is not None:
            rounds.append(count)
        return [
            SkippedRow(f"p@{number}", number, "unreadable")
            if fate(number) == UNREADABLE
            else Draw(number, f"p@{number}", DatasetConfig(name="rows"), f"rows:{number}", {})
            for number in range(start, start + count)
        ]

    def outcome(draw: Draw) -> Outcome:
        lost = {LOST: GivenUpPrompt, BAD: SkippedRow}.get(fate(draw.number))
        return _group(draw, fate) if lost is None else lost(draw.uid, draw.number, "broken")

    async def run(draws: Sequence[Draw]) -> list[Outcome]:
        return [outcome(draw) for draw in draws]

    defaults: dict[str, Any] = {"first_draw": 0, "count": 2, "draw_limit": 16, "filters": True}
    return asyncio.run(collect_groups(take, run, **{**defaults, **settings}))


def _group(draw: Draw, fate: Callable[[int], str]) -> Group:
    rewards = (0.0, 1.0) if fate(draw.number) == VARIED else (1.0, 1.0)
    attempts = [
        Trajectory(draw.uid, sample, (Turn([1], [2], [1], rewards=np.array([reward], np.float32)),))
        for sample, reward in enumerate(rewards)
    ]
    return Group(draw.uid, draw.number, tuple(attempts))
