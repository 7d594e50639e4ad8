"""Kind `tracker`: a place that metrics are sent to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig


class TrackerConfig(ComponentConfig):
    """Settings of a tracker."""

    kind: ClassVar[str] = "tracker"

    @property
    def silences_start(self) -> bool:
        """Return whether the lines that a start writes to stderr are to be left out."""
        return False


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that a tracker is given at the start.

    run_dir: the run's folder. resume_step: last step kept from an earlier attempt, 0 in a new run, which keeps none.
    total_steps: steps of the whole run. config: every setting as plain values. notes: lines about the start that a
    person should see: what was resumed, how many samples there are, what was left out and why.
    """

    run_dir: Path
    resume_step: int
    total_steps: int
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    continues: bool = False
    """True if a checkpoint is continued also where `resume_step` is 0: its step 1 is still to be evaluated."""

    @property
    def is_resumed(self) -> bool:
        """Return whether this goes on from a checkpoint; a new run has no earlier part in any store."""
        return self.continues or self.resume_step > 0

    @property
    def first_step(self) -> int:
        """The first step whose metrics may come. A new run may begin with step 0, the evaluation of the model as it is
        before training."""
        return self.resume_step + 1 if self.is_resumed else 0


class Tracker(Protocol):
    """Receive metrics on the loop's thread.

    Factory: `Class(config)`. Raises ConfigError in the factory when its optional library is missing.
    """

    def start(self, info: RunInfo) -> None:
        """Called before the first step; drop whatever was logged of `info.first_step` and later."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one finished step, evaluation included; step 0 has those of an evaluation before training."""
        ...

    def flush(self) -> None:
        """Make everything logged so far durable; called before each checkpoint, which covers those steps."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


@runtime_checkable
class ShowsWarnings(Protocol):
    """A tracker that people look at while the run goes on, which shows warnings too."""

    def warn(self, step: int, kind: str, words: str) -> None:
        """Show what is off at a step.

        Args:
            step: The step that has just been logged.
            kind: A short name of the trouble; what is said of one kind again and again may be shown once in a while.
            words: A sentence or two: what is off, and what to do.
        """
        ...
