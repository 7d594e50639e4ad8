"""Where a run is: the last finished step, and the step that the loop is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class RunState:
    """Where a run is. step: last finished step. checkpoint: newest one of this run, if any, which covers saved_step;
    one that is still being written is none."""

    step: int = 0
    saved_step: int = 0
    checkpoint: Path | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass
class StepUnderWay:
    """How far the loop is with a step that is not finished.

    number: of that step; None between two steps. updated: the last step whose update is done. metrics: of that update.
    """

    number: int | None = None
    updated: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
