"""Where a run is: the last finished step, and the newest checkpoint."""

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
