"""The learning rate schedules. They are pure functions of the optimizer step, so they have no state to save.

With W warm-up steps, step s has s / W of the peak learning rate, and step W + 1 has the peak. Later, a decaying
schedule falls towards a minimum. It would reach the minimum in step total + 1, which never runs.
"""

from __future__ import annotations

import math

from spurline.protocols.schedule import ScheduleConfig
from spurline_models.optimizers.configs import WsdConfig


class WarmedUp:
    """A `Schedule` with linear warm-up. Subclasses define the factors after warm-up."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        self._min_ratio: float = getattr(config, "min_ratio", 0.0)

    def factor(self, step: int, total: int) -> float:
        assert step >= 1, step
        warmup = self._config.warmup(total)
        if step <= warmup:
            return step / warmup
        share = self.after_warmup(step - warmup - 1, total - warmup, total)
        return self._min_ratio + (1.0 - self._min_ratio) * share

    def after_warmup(self, done: int, steps: int, total: int) -> float:
        """Return a share from 0 (`min_ratio`) to 1 (the peak), when `done` of the `steps` after warm-up are done."""
        return 1.0


class Constant(WarmedUp):
    """The schedule `constant`."""


class Linear(WarmedUp):
    """The schedule `linear`."""

    def after_warmup(self, done: int, steps: int, total: int) -> float:
        return 1.0 - _progress(done, steps)


class Cosine(WarmedUp):
    """The schedule `cosine`."""

    def after_warmup(self, done: int, steps: int, total: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * _progress(done, steps)))


class WarmupStableDecay(WarmedUp):
    """The schedule `wsd`."""

    def __init__(self, config: WsdConfig) -> None:
        super().__init__(config)
        self._decay = config.decay

    def after_warmup(self, done: int, steps: int, total: int) -> float:
        decay = self._decay(total)
        stable = max(0, steps) - decay
        return 1.0 if done < stable or not decay else 1.0 - _progress(done - stable, decay)


def _progress(done: int, steps: int) -> float:
    return min(1.0, done / max(1, steps))
