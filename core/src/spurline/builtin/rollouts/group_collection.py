"""Collect exactly the groups that one step trains on: draw, run, leave out, draw what is missing.

Place on the way: PromptDraws -> GroupRunner -> this -> scored groups, in draw order. Knows nothing of engines, models
or batches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from spurline.builtin.rollouts.draws import Draw
from spurline.errors import RunFailedError
from spurline.rl.group_runner import Outcome
from spurline.rl.quarantine import QuarantinedGroup, SkippedRow
from spurline.rl.returns import has_zero_variance
from spurline.rl.trajectory import Group

RunGroups = Callable[[Sequence[Draw]], Awaitable[Sequence[Outcome]]]
TakeDraws = Callable[[int, int], Sequence[Draw | SkippedRow]]


@dataclass(frozen=True)
class Collected:
    """groups: exactly as many as asked for, in draw order. next_draw: the first prompt not drawn.

    every: all groups that were scored, those left out included. quarantined: prompts given up. skipped: draws of
    rows that cannot be used.
    refill_missing: groups with equal rewards that are trained on, as the limit of draws was reached.
    """

    groups: tuple[Group, ...]
    every: tuple[Group, ...]
    next_draw: int
    quarantined: int
    skipped: int
    refill_missing: int


async def collect_groups(
    take: TakeDraws, run: RunGroups, *, first_draw: int, count: int, draw_limit: int, leave_out_equal: bool
) -> Collected:
    """Draw until `count` groups can be trained on.

    Each round draws exactly the number still missing, so which prompts a step takes depends on the results alone, never
    on which of them came first. leave_out_equal: groups whose returns are equal make way for further prompts (dynamic
    sampling, DAPO, Yu et al. 2025, arXiv:2503.14476); once `draw_limit` prompts are drawn, the earliest of them are
    used after all, since a batch has a fixed number of prompts. Rows that cannot be used are no part of that limit:
    `take` raises DataError when nothing but such rows is left.
    Raises RunFailedError when so many prompts were given up that `count` cannot be reached.
    """
    kept: list[Group] = []
    equal: list[Group] = []
    quarantined = skipped = 0
    next_draw = first_draw
    while len(kept) < count:
        tried = len(kept) + len(equal) + quarantined
        missing = min(count - len(kept), draw_limit - tried)
        if missing == 0:
            break
        taken = take(next_draw, missing)
        next_draw += missing
        draws = [draw for draw in taken if isinstance(draw, Draw)]
        skipped += missing - len(draws)
        for outcome in await run(draws):
            if isinstance(outcome, SkippedRow):
                skipped += 1
            elif isinstance(outcome, QuarantinedGroup):
                quarantined += 1
            elif leave_out_equal and has_zero_variance(outcome):
                equal.append(outcome)
            else:
                kept.append(outcome)
    short = count - len(kept)
    if short > len(equal):
        raise RunFailedError(
            f"The step drew {len(kept) + len(equal) + quarantined} prompts and {quarantined} of them were given up, so "
            f"only {len(kept) + len(equal)} of {count} groups are there. Correct what fails, or raise "
            f"source.max_draws_per_step, which is {draw_limit}."
        )
    groups = sorted([*kept, *equal[:short]], key=lambda group: group.draw)
    every = sorted([*kept, *equal], key=lambda group: group.draw)
    return Collected(tuple(groups), tuple(every), next_draw, quarantined, skipped, short)
