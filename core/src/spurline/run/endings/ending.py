"""Describe how a run ended: its result, or an error that names the last checkpoint and how to continue."""

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
    """The result of a run that ended without an error.

    Attributes:
        status: `finished`, or `stopped` if a signal or a request ended the run early.
        step: The last finished step.
        metrics: Metrics of the last finished step. Empty if this process trained no step.
        checkpoint: The newest complete checkpoint.
        signal: The signal that stopped the run, if any.
        stop_reason: The reason given to `request_stop`, or the reason why `stop_when` ended the run early.
        go_on: A sentence on how to continue a stopped run.
        best: `metric`, `step` and `value` of the best evaluation so far, if `checkpoint.keep_best` is set.
        warnings: Sentences about problems that lasted until the end. The report also lists problems that went away.
        model: The folder of the model that a finished run exported, if `checkpoint.export_hf` is set.
        adapter: The folder of the exported adapter, if `checkpoint.export_adapter` is set.
        files: Files that plugins made from the run's metrics, by name, such as `report`.
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
        """Return the path of the HTML report, or None if there is no report."""
        return self.files.get("report")


def explained(error: BaseException, state: RunState, how: str) -> BaseException:
    """Return the error that ended a run. Some errors get a text or note on the last checkpoint and how to continue.

    `how` is a sentence on how to continue.
    """
    kept = state.checkpoint
    where = f"The last checkpoint is {kept}." if kept else "There is no checkpoint."
    if isinstance(error, RankFailedError):
        error.add_note(f"{where} {how}")
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(f"Stopped at once, after step {state.step:,}. {where} {how}")
    if isinstance(error, NonFiniteLossError):
        where = f"The last good checkpoint is {kept}." if kept else "There is no earlier checkpoint."
        return NonFiniteLossError(f"Step {state.step + 1}: {error} {where}")
    return error


def go_on(loaded: LoadedConfig, options: Sequence[str]) -> str:
    """Return a sentence on how to continue a run, with these options of the command line."""
    command = loaded.train_command(*options)
    return f"Go on with: {command}" if command is not None else "Train the same config again to go on."
