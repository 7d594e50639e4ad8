"""How a run ends: what its last error says of what is left and how to go on, its status on the disk, and its result.

In: the error that ended it, if one did. Out: that error with what a person should know besides, a summary with the
status, and a checkpoint elsewhere when the run directory is lost. What asks a run to stop is in `stop_request`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from spurline.protocols.source import BatchSource
from spurline.run.checkpoints.saving import Saving
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline.run.endings.rescue import rescue
from spurline.run.health import findings, trained_steps
from spurline.run.state import RunState, StepUnderWay
from spurline.trackers.jsonl import read_metrics

Status = Literal["finished", "stopped"]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    status: `finished`, or `stopped` by a signal after a checkpoint. metrics: of the last step.
    checkpoint: the newest one. report: the HTML page, if written. signal: what stopped the run, if anything.
    stop_reason: what `request_stop` was given, if that stopped the run; why `stop_when` finished it early.
    best: `metric`, `step` and `value` of the best evaluation so far, with `checkpoint.keep_best`.
    warnings: what was off and lasted, in sentences; the report also has what passed by.
    go_on: how to continue a stopped run, as a sentence.
    model, adapter: what a finished run exported, with `checkpoint.export_hf` and `export_adapter`: the last weights.
    """

    status: Status
    step: int
    metrics: Mapping[str, float]
    checkpoint: Path | None
    report: Path | None
    signal: Signals | None = None
    stop_reason: str | None = None
    go_on: str = ""
    best: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    model: Path | None = None
    adapter: Path | None = None


class Ending:
    """Of a run whose components are built.

    files: its record, which is told the status. options: words that the command needs to be given again as long as no
    checkpoint holds what they permit.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: RunDirectory,
        source: BatchSource,
        state: RunState,
        under_way: StepUnderWay,
        saving: Saving,
        files: RunRecordFiles,
        options: Sequence[str],
    ) -> None:
        self._loaded = loaded
        self._directory = directory
        self._source = source
        self._state = state
        self._under_way = under_way
        self._saving = saving
        self._files = files
        self._options = options

    def go_on(self) -> str:
        """How to continue from what is saved by now. The checkpoints of this run know what it was allowed to change."""
        return go_on(self._loaded, () if self._saving.has_saved else self._options)

    def explained(self, error: BaseException) -> BaseException:
        """What ended the run, with what is left of it and how to go on."""
        self._saving.settle(error)
        lost = error if isinstance(error, RunDirectoryLostError) else self._loss_behind(error)
        if lost is not None:
            return self._rescued(lost)
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
            failed = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self._files.summary["warnings"] = self._warnings()
            if error is None and stop_reason is not None:
                self._files.summary["stop_reason"] = stop_reason
            given_up = self._source.given_up()
            self._files.finish(status if error is None else failed, None if error is None else str(error), given_up)
        except (OSError, RunDirectoryError) as failure:
            if error is None:
                raise RunFailedError(f"{summary} cannot be written: {failure}.") from failure
            error.add_note(f"{summary} could not be written either: {failure}")

    def record_failed_hook(self, error: BaseException | None, failure: Exception) -> None:
        """Of `on_run_end`; it makes a failed run of one that no error ended."""
        if error is None:
            self._files.finish("failed", str(failure))
        else:
            error.add_note(f"on_run_end failed too: {type(failure).__name__}: {failure}")

    def lasting_warnings(self) -> tuple[str, ...]:
        """What was off and lasted, as `record` has found it."""
        return tuple(found["words"] for found in self._files.summary["warnings"] if found["lasts"])

    def _warnings(self) -> list[dict[str, Any]]:
        """What was off at any step, as the report says it."""
        lines = read_metrics(self._directory.metrics, skip_foreign=True)
        steps = trained_steps(lines)
        return [
            {"kind": found.kind, "words": f"{found.words} {found.when(steps)}.", "lasts": found.lasts}
            for found in findings(lines, self._loaded.resolved())
        ]

    def _loss_behind(self, error: BaseException) -> RunDirectoryLostError | None:
        """The loss of the run directory, when that is why something else failed between two updates."""
        if not isinstance(error, Exception) or self._under_way.number not in (None, self._under_way.updated):
            return None
        try:
            self._directory.check_present()
        except RunDirectoryLostError as lost:
            return lost
        return None

    def _rescued(self, error: RunDirectoryLostError) -> RunDirectoryLostError:
        """Save the last update elsewhere, and go on with the record of the run there."""
        step = max(self._state.step, self._under_way.updated)
        # What the update measured, where its evaluation or its metrics line had not come yet.
        pending = self._under_way.metrics if step > self._state.step else None
        if step == 0:
            return RunDirectoryLostError(f"{error} No step was finished yet, so nothing is lost. {self.go_on()}")

        def save(directory: RunDirectory) -> None:
            self._saving.save_elsewhere(directory, step, pending)
            files = RunRecordFiles(directory, self._files.summary)
            files.start(self._loaded.resolved() | {"run_dir": str(directory.path)}, step)
            self._files = files

        directory, failures = rescue(self._directory.path, step, save)
        told = [str(error), *failures]
        if directory is None:
            told.append(f"Step {step:,} could not be saved anywhere.")
        else:
            command = self._loaded.train_command("--set", f"run_dir={directory.path}")
            how = f"Go on with: {command}" if command is not None else "Train the same config with that run_dir."
            told.append(f"Step {step:,} is saved in {directory.path}, without the metrics before it. {how}")
        return RunDirectoryLostError(" ".join(told))


def go_on(loaded: LoadedConfig, options: Sequence[str]) -> str:
    """How to continue a run with these words of a command line besides."""
    command = loaded.train_command(*options)
    return f"Go on with: {command}" if command is not None else "Train the same config again to go on."
