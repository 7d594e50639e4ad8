"""The schedules: pure functions of the optimizer step, so there is nothing to save.

There are W warm-up steps, in which step s gets s / W of the peak. Then a shape runs over the remaining steps. The first
of them gets the peak, and step total + 1, which never runs, would get the minimum.
"""

from __future__ import annotations

import math

from spurline.protocols.schedule import ScheduleConfig
from spurline_models.optimizers.configs import WsdConfig


class WarmedUp:
    """A `Schedule` that begins with the linear warm-up of its config, and stays at the peak."""

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
        """Return the share of the way from `min_ratio` to the peak after `done` of the `steps` that follow warm-up."""
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
