"""Kind `schedule`: the learning rate of each optimizer step, as a share of its peak."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

from pydantic import Field

from spurline.config.section import ComponentConfig


class ScheduleConfig(ComponentConfig):
    """Settings of a schedule. A bare string is short for its `name`."""

    kind: ClassVar[str] = "schedule"

    warmup_steps: int | None = Field(default=None, ge=0)
    """Number of optimizer steps of linear warm-up from zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Length of the warm-up as a share of all optimizer steps. It is used if `warmup_steps` is not given."""

    def warmup(self, total: int) -> int:
        """Return the number of warm-up steps in a run of `total` optimizer steps."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_ratio * total)

    def notes(self, total: int) -> list[str]:
        """Return notes for the user about these settings in a run of `total` optimizer steps."""
        warmup = self.warmup(total)
        if warmup < total or not warmup:
            return []
        return [
            f"schedule: warm-up takes {warmup:,} optimizer steps and the run has {total:,}, so the learning rate "
            f"{'reaches its peak only in the last step' if warmup == total else 'never reaches its peak'}. Lower "
            "schedule.warmup_steps or warmup_ratio, or train longer."
        ]


class Schedule(Protocol):
    """A schedule of the learning rate.

    Factory: `Class(config)`. `spurline_models.optimizers.schedules.WarmedUp` is a base class that does the warm-up.
    """

    def factor(self, step: int, total: int) -> float:
        """Return the learning rate of optimizer step `step` (from 1) of `total` steps, divided by its peak; >= 0.

        This is a pure function, so a resumed run needs no state. If a resume raises `total`, later steps get the
        factors of the longer run. `step` may be larger than `total`.
        """
        ...
