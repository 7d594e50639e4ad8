"""How a run ends: what its last error says of what is left and how to go on, its status on the disk, and its result.

In: the error that ended it, if one did. Out: that error with what a person should know besides, and a summary with the
status. What asks a run to stop is in `stop_request`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, Literal

from spurline.config.loading import LoadedConfig
from spurline.errors import (
    NonFiniteLossError,
    RankFailedError,
    RunDirectoryError,
    RunDirectoryLostError,
    RunFailedError,
)
from spurline.plugins.run_view import Warned
from spurline.protocols.source import BatchSource
from spurline.run.checkpoints.saving import Saving
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline.run.state import RunState

Status = Literal["finished", "stopped"]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    status: `finished`, or `stopped` by a signal after a checkpoint. metrics: of the last step.
    checkpoint: the newest one. signal: what stopped the run, if anything.
    stop_reason: what `request_stop` was given, if that stopped the run; why `stop_when` finished it early.
    best: `metric`, `step` and `value` of the best evaluation so far, with `checkpoint.keep_best`.
    warnings: what was off and lasted, in sentences; the report also has what passed by.
    go_on: how to continue a stopped run, as a sentence.
    model, adapter: what a finished run exported, with `checkpoint.export_hf` and `export_adapter`: the last weights.
    files: what plugins made of the run's record, by name, such as the page `report`.
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


class Ending:
    """The ending of a run whose components are built.

    files: its record, which is told the status. options: words that the command needs to be given again as long as no
    checkpoint holds what they permit.

    judges: say what was off at any step, for the summary and the result.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: RunDirectory,
        source: BatchSource,
        state: RunState,
        saving: Saving,
        files: RunRecordFiles,
        options: Sequence[str],
    ) -> None:
        self._loaded = loaded
        self._directory = directory
        self._source = source
        self._state = state
        self._saving = saving
        self._files = files
        self._options = options
        self.judges: list[Callable[[], Sequence[Warned]]] = []
        self._warnings: tuple[Warned, ...] = ()

    def go_on(self) -> str:
        """How to continue from what is saved by now. The checkpoints of this run know what it was allowed to change."""
        return go_on(self._loaded, () if self._saving.has_saved else self._options)

    def explained(self, error: BaseException) -> BaseException:
        """Return the error that ended the run, with what is left of it and how to go on."""
        self._saving.settle(error)
        kept = self._state.checkpoint
        where = f"The last checkpoint is {kept}." if kept else "There is no checkpoint."
        if isinstance(error, RankFailedError):
            error.add_note(f"{where} {self.go_on()}")
        if isinstance(error, KeyboardInterrupt):
            return KeyboardInterrupt(f"Stopped at once, after step {self._state.step:,}. {where} {self.go_on()}")
        if isinstance(error, NonFiniteLossError):
            where = f"The last good checkpoint is {kept}." if kept else "There was no checkpoint before it."
            return NonFiniteLossError(f"Step {self._state.step + 1}: {error} {where}")
        return error

    def record(self, error: BaseException | None, status: Status, stop_reason: str | None) -> None:
        """Write how the run ended; a failure here never hides the error that ended it.

        status, stop_reason: of a run that no error ended.
        """
        summary = self._directory.summary
        try:
            # Another folder may be in its place.
            self._directory.check_present()
            failed = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self._warnings = tuple(warning for judge in self.judges for warning in judge())
            self._files.summary["warnings"] = [asdict(warning) for warning in self._warnings]
            if error is None and stop_reason is not None:
                self._files.summary["stop_reason"] = stop_reason
            given_up = self._source.given_up()
            self._files.finish(status if error is None else failed, None if error is None else str(error), given_up)
        except (OSError, RunDirectoryError, RunDirectoryLostError) as failure:
            if error is None:
                raise RunFailedError(f"{summary} cannot be written: {failure}.") from failure
            if not isinstance(error, RunDirectoryLostError):
                error.add_note(f"{summary} could not be written either: {failure}")

    def lasting_warnings(self) -> tuple[str, ...]:
        """Return the warnings that lasted."""
        return tuple(warning.words for warning in self._warnings if warning.lasts)


def go_on(loaded: LoadedConfig, options: Sequence[str]) -> str:
    """How to continue a run with these words of a command line besides."""
    command = loaded.train_command(*options)
    return f"Go on with: {command}" if command is not None else "Train the same config again to go on."
