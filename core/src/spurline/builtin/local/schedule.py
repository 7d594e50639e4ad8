"""Learning rate as a pure function of the optimizer step.

It has no state, so there is nothing to save and nothing to drift on resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spurline.config.run_config import CriticConfig, RunConfig, ScheduleConfig


def policy_rate(run: RunConfig, total: int) -> Callable[[int], float]:
    """The policy's learning rate by optimizer step, for a run of `total` of them."""
    return lambda step: learning_rate(step, peak=run.optimizer.learning_rate, total=total, schedule=run.schedule)


def critic_rate(critic: CriticConfig) -> Callable[[int], float]:
    """The critic's, by its own optimizer steps; constant after warm-up, so it needs no total."""
    peak, warmup = critic.optimizer.learning_rate, critic.warmup_steps
    return lambda step: peak * min(1.0, step / warmup) if warmup else peak


def learning_rate(step: int, *, peak: float, total: int, schedule: ScheduleConfig) -> float:
    """The rate used in optimizer step `step`, counted from 1, of a run of `total` steps.

    With W warm-up steps, step s <= W uses peak * s / W. After that the shape runs over the remaining steps: the first
    one uses the peak, and step total + 1, which never runs, would use the minimum; so no step is spent at rate 0.
    Steps beyond `total` stay at the minimum.
    """
    assert step >= 1, step
    warmup = warmup_steps(schedule, total)
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    progress = min(1.0, (step - warmup - 1) / max(1, total - warmup))
    shape = 1.0 - progress if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * shape)


def warmup_steps(schedule: ScheduleConfig, total: int) -> int:
    """Optimizer steps of warm-up."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return math.ceil(schedule.warmup_ratio * total)
