"""The knobs of the scheduler, and the bound that follows from them.

A batch is numbered by the updates before it: batch 0 is the first. Weights are numbered by the updates in them:
version 0 is what the run began with. A token of version v in batch d is d - v updates old, its staleness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["fifo", "window"]
AtBound = Literal["wait", "mask"]


@dataclass(frozen=True)
class SchedulerLimits:
    """What the scheduler may do.

    max_staleness: S. batch_size: groups per batch, B. max_running: groups generated at the same time, K.
    order: `fifo` takes groups as they were drawn; `window` lets a finished group overtake where that cannot make
    another one too old. at_bound: `wait` for groups that would become too old, or take what is finished and `mask` what
    became too old. draw_limit: prompts that may be drawn for one batch before groups that were left out are used.
    num_batches: of the whole run.
    """

    max_staleness: int
    batch_size: int
    max_running: int
    order: Order
    at_bound: AtBound
    draw_limit: int
    num_batches: int

    def most_untrained(self, version: int, taken: int) -> int:
        """Groups that may be admitted and not yet taken, with weights of `version`, `taken` batches having been taken.

        They fill the batches up to number version + S, the last one that tokens of this version may be trained in.
        """
        last = min(version + self.max_staleness, self.num_batches - 1)
        return (last - taken + 1) * self.batch_size
