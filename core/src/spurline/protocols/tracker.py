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
        """Return whether a run prints no lines to stderr while it starts."""
        return False


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that a tracker gets at the start.

    run_dir: the run's folder. resume_step: last step that is kept of an earlier start of the run; 0 in a new run.
    total_steps: steps of the whole run. config: every setting as plain values. notes: lines to show the user, such as
    what was resumed, how many samples there are, and which were left out and why.
    """

    run_dir: Path
    resume_step: int
    total_steps: int
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    continues: bool = False
    """True if the run continues from a checkpoint. `resume_step` is 0 if the checkpoint's step 1 must be evaluated."""

    @property
    def is_resumed(self) -> bool:
        """Return whether the run continues from a checkpoint, so that stores have its earlier steps."""
        return self.continues or self.resume_step > 0

    @property
    def first_step(self) -> int:
        """Return the first step whose metrics may be logged. A new run may log step 0, which is the evaluation before
        training."""
        return self.resume_step + 1 if self.is_resumed else 0


class Tracker(Protocol):
    """Receives metrics on the loop's thread.

    Factory: `Class(config)`. Raises ConfigError in the factory when its optional library is missing.
    """

    def start(self, info: RunInfo) -> None:
        """Prepare for logging, before the first step. Drop all logged metrics of `info.first_step` and later."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one finished step, evaluation included. Step 0 is the evaluation before training."""
        ...

    def flush(self) -> None:
        """Make everything logged so far durable. Called before each checkpoint, which covers these steps."""
        ...

    def close(self) -> None:
        """Flush, and close all files and connections."""
        ...


@runtime_checkable
class ShowsWarnings(Protocol):
    """A tracker that people watch during the run, so it also shows warnings."""

    def warn(self, step: int, kind: str, words: str) -> None:
        """Show a warning about a step.

        Args:
            step: The step that has just been logged.
            kind: A short name of the trouble; what is said of one kind again and again may be shown once in a while.
            words: A sentence or two: what is off, and what to do.
        """
        ...
