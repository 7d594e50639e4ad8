"""Kind `schedule`: the learning rate of each optimizer step, as a share of its peak."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

from pydantic import Field

from spurline.config.section import ComponentConfig


class ScheduleConfig(ComponentConfig):
    """Settings of a schedule; a bare string is short for its `name`."""

    kind: ClassVar[str] = "schedule"

    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of linear warm-up from zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all optimizer steps; used when `warmup_steps` is not given."""

    def warmup(self, total: int) -> int:
        """Optimizer steps of warm-up in a run of `total` of them."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_ratio * total)

    def notes(self, total: int) -> list[str]:
        """Return notes for people on these settings in a run of `total` optimizer steps."""
        warmup = self.warmup(total)
        if warmup < total or not warmup:
            return []
        return [
            f"schedule: warm-up takes {warmup:,} optimizer steps and the run has {total:,}, so the learning rate "
            f"{'reaches its peak in the last one only' if warmup == total else 'never reaches its peak'}. Lower "
            "schedule.warmup_steps or warmup_ratio, or train longer."
        ]


class Schedule(Protocol):
    """Learning rate by optimizer step.

    Factory: `Class(config)`. `spurline_models.optimizers.schedules.WarmedUp` is a base class that does the warm-up.
    """

    def factor(self, step: int, total: int) -> float:
        """Return the factor of the peak learning rate in optimizer step `step`, from 1, of `total`: >= 0.

        A pure function, so that a resumed run needs no state of it. A resume may raise `total`: the steps from there on
        get the factors of the longer run. `step` may be larger than `total`.
        """
        ...
