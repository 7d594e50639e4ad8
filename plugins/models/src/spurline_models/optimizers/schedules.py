"""The schedules: pure functions of the optimizer step, so there is nothing to save and nothing to drift.

After W warm-up steps, in which step s gets s / W of the peak, a shape runs over the remaining steps: the first of them
gets the peak, and step total + 1, which never runs, would get the minimum; so no step is spent at rate 0. Steps beyond
`total` stay at the minimum.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from spurline.protocols.schedule import ScheduleConfig
from spurline_models.optimizers.configs import DecayingConfig, WsdConfig


class WarmedUp(ABC):
    """A `Schedule` that begins with the linear warm-up of its config."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._warmup = config.warmup

    def factor(self, step: int, total: int) -> float:
        assert step >= 1, step
        warmup = self._warmup(total)
        if step <= warmup:
            return step / warmup
        return self.after_warmup(step - warmup - 1, total - warmup, total)

    @abstractmethod
    def after_warmup(self, done: int, steps: int, total: int) -> float:
        """Return the factor when `done` of the `steps` after warm-up are done.

        `steps` is 0 or less if warm-up takes all.
        """


class Constant(WarmedUp):
    """The schedule `constant`."""

    def after_warmup(self, done: int, steps: int, total: int) -> float:
        return 1.0


class Decaying(WarmedUp):
    """A `Schedule` that ends at the `min_ratio` of its config."""

    def __init__(self, config: DecayingConfig) -> None:
        super().__init__(config)
        self._min_ratio = config.min_ratio

    def _above_minimum(self, share: float) -> float:
        return self._min_ratio + (1.0 - self._min_ratio) * share


class Linear(Decaying):
    """The schedule `linear`."""

    def after_warmup(self, done: int, steps: int, total: int) -> float:
        return self._above_minimum(1.0 - _progress(done, steps))


class Cosine(Decaying):
    """The schedule `cosine`."""

    def after_warmup(self, done: int, steps: int, total: int) -> float:
        return self._above_minimum(0.5 * (1.0 + math.cos(math.pi * _progress(done, steps))))


class WarmupStableDecay(Decaying):
    """The schedule `wsd`."""

    def __init__(self, config: WsdConfig) -> None:
        super().__init__(config)
        self._decay = config.decay

    def after_warmup(self, done: int, steps: int, total: int) -> float:
        decay = self._decay(total)
        stable = max(0, steps) - decay
        if done < stable or not decay:
            return 1.0
        return self._above_minimum(1.0 - _progress(done - stable, decay))


def _progress(done: int, steps: int) -> float:
    return min(1.0, done / max(1, steps))
