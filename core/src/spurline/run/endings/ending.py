"""The result of a run, and what its last error says of what is left and how to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, Literal

from spurline.config.loading import LoadedConfig
from spurline.errors import NonFiniteLossError, RankFailedError
from spurline.plugins.run_view import RunState

Status = Literal["finished", "stopped"]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: `finished`, or `stopped` by a signal or a request after a checkpoint.
        step: The last finished step.
        metrics: Those of that step; empty if this process made none.
        checkpoint: The newest one.
        signal: The signal that stopped the run, if any.
        stop_reason: The reason given to `request_stop`, or why `stop_when` finished the run early.
        go_on: A sentence on how to continue a stopped run.
        best: `metric`, `step` and `value` of the best evaluation so far, with `checkpoint.keep_best`.
        warnings: Trouble that lasted, in sentences; the report also has what passed by.
        model: The folder that a finished run exported, with `checkpoint.export_hf`.
        adapter: Likewise, with `checkpoint.export_adapter`.
        files: Files that plugins made of the run's record, by name, such as the page `report`.
    """

    status: Status
    step: int
    metrics: Mapping[str, float]
    checkpoint: Path | None
    signal: Signals | None = None
    stop_reason: str | None = None
    go_on: str = ""
    best: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    model: Path | None = None
    adapter: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])

    @property
    def report(self) -> Path | None:
        """The HTML page; None where none was written."""
        return self.files.get("report")


def explained(error: BaseException, state: RunState, how: str) -> BaseException:
    """Return the error that ended a run, with what is left of it and how to go on.

    Args:
        error: What ended the run.
        state: How far it got.
        how: A sentence on how to continue.
    """
    kept = state.checkpoint
    where = f"The last checkpoint is {kept}." if kept else "There is no checkpoint."
    if isinstance(error, RankFailedError):
        error.add_note(f"{where} {how}")
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(f"Stopped at once, after step {state.step:,}. {where} {how}")
    if isinstance(error, NonFiniteLossError):
        where = f"The last good checkpoint is {kept}." if kept else "There was no checkpoint before it."
        return NonFiniteLossError(f"Step {state.step + 1}: {error} {where}")
    return error


def go_on(loaded: LoadedConfig, options: Sequence[str]) -> str:
    """How to continue a run with these words of a command line besides."""
    command = loaded.train_command(*options)
    return f"Go on with: {command}" if command is not None else "Train the same config again to go on."
