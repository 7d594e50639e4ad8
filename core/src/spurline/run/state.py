"""Where a run is: the last finished step, and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class RunState:
    """Progress of a run. step: the last finished one. checkpoint: the newest complete one, which covers saved_step."""

    step: int = 0
    saved_step: int = 0
    checkpoint: Path | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
