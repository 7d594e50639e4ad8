"""Kind `tracker`: write the metrics of a run to files, the terminal or a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig


class TrackerConfig(ComponentConfig):
    """Settings of a tracker."""

    kind: ClassVar[str] = "tracker"


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that a tracker gets at the start.

    Attributes:
        run_dir: The run's folder.
        resume_step: Last step whose metrics are kept from earlier processes of the run; 0 in a new run.
        total_steps: Steps of the whole run.
        config: Every setting as plain values.
        notes: Lines to show the user, about the resume and the data.
        continues: Whether the run continues from a checkpoint. `resume_step` may still be 0, if step 1 was saved
            without its evaluation.
    """

    run_dir: Path
    resume_step: int
    total_steps: int
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    continues: bool = False

    @property
    def is_resumed(self) -> bool:
        """Return whether the run continues from a checkpoint."""
        return self.continues or self.resume_step > 0

    @property
    def first_step(self) -> int:
        """Return the first step that may be logged. A new run may log step 0, the evaluation before training."""
        return self.resume_step + 1 if self.is_resumed else 0


class Tracker(Protocol):
    """Receives metrics on the loop's thread.

    Factory: `Class(config)`, which raises ConfigError if an optional library is missing.
    """

    def start(self, info: RunInfo) -> None:
        """Prepare for logging, before the first step. Drop all logged metrics of `info.first_step` and later."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one finished step, evaluation included. Step 0 is the evaluation before training."""
        ...

    def flush(self) -> None:
        """Make everything logged so far durable. The run calls this before each checkpoint."""
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
            kind: A short name of the trouble. Repeated warnings with the same name may be left out.
            words: A sentence or two about the trouble and what to do.
        """
        ...
