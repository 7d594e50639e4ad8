"""One run from config to result: builds the components, restores a checkpoint, trains, writes the record.

`Run(load_config("run.yaml")).train()` is the whole Python API; the command line does the same. SIGINT and SIGTERM ask a
run to stop after the step it is in; a second one stops it at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Literal

from spurline.config.loading import LoadedConfig
from spurline.data.configs import SerialPrefetchConfig
from spurline.errors import NonFiniteLossError, RunFailedError
from spurline.progress import Progress, silent
from spurline.protocols.backend import Backend
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.source import BatchSource
from spurline.protocols.tracker import RunInfo
from spurline.report.page import write_run_report
from spurline.run import loop
from spurline.run.build import build_components, build_update, summarize_run
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline.run.export import export_hf
from spurline.run.resume import Resume, find_resume, restore, save_state


@dataclass
class RunState:
    """Where a run is. step: last finished step. checkpoint: newest one of this run, if any, which covers saved_step."""

    step: int = 0
    saved_step: int = 0
    checkpoint: Path | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    status: `finished`, or `stopped` by a signal after a checkpoint. metrics: of the last step.
    checkpoint: the newest one. report: the HTML page, if written. signal: what stopped the run, if anything.
    """

    status: Literal["finished", "stopped"]
    step: int
    metrics: Mapping[str, float]
    checkpoint: Path | None
    report: Path | None
    signal: signal.Signals | None = None


class Run:
    """One training run. `source`, `backend` and `batches` exist while `train` runs; hooks get the run as an argument.

    resume: `auto` continues from the latest checkpoint of run_dir if there is one; `never` refuses a run_dir that has
    one; anything else is the path of a checkpoint folder. progress: told what the start is doing; silent by default.
    """

    source: BatchSource
    backend: Backend
    batches: Prefetch

    def __init__(self, loaded: LoadedConfig, resume: str = "auto", progress: Progress = silent) -> None:
        self.loaded = loaded
        self.config = loaded.config
        self.hooks = loaded.host.hooks
        self.directory = RunDirectory(loaded.config.run_dir)
        self.state = RunState()
        self._resume = resume
        self._progress = progress
        self._resumed = Resume(None)
        self._notes: list[str] = []
        self._stop = StopRequest()

    def train(self) -> RunResult:
        """Train to the end or to a stop signal. Raises SpurlineError; what was saved before an error is intact.

        Signals are caught once training begins; before that there is nothing to save, and they act as usual.
        """
        with ExitStack() as stack:
            self.directory.open()
            stack.callback(self.directory.close)
            self._build(stack)
            stack.enter_context(self._stop)
            error: BaseException | None = None
            try:
                self._start_trackers(stack)
                self.hooks.on_run_start(run=self)
                self._start_batches(stack)
                self._settle_resume()
                loop.train(self)
                if self.state.step > self.state.saved_step:
                    # A stop was asked for after the last step had its chance to save.
                    self._save(self.state.step)
                self._export_if_finished()
            except BaseException as raised:
                error = self._with_last_checkpoint(raised)
                if error is raised:
                    raise
                raise error from raised
            finally:
                self._end(error)
            report = write_run_report(self.loaded, self.directory) if self.config.report.enabled else None
            return RunResult(
                self._status(), self.state.step, self.state.metrics, self.state.checkpoint, report, self._stop.signal
            )

    def _build(self, stack: ExitStack) -> None:
        resume = self._resumed = find_resume(self.directory, self.loaded, self._resume)
        components = self._components = build_components(self.loaded, stack, self._progress)
        self.source, self.backend = components.data.source, components.backend
        self._notes = [*components.notes, *resume.notes]
        if resume.checkpoint is not None:
            self._progress("restoring the checkpoint")
            self._notes += restore(resume.checkpoint, components, self.loaded)
            self.state = RunState(resume.checkpoint.step, resume.checkpoint.step, resume.checkpoint.path)
        update = build_update(components, self.loaded)
        self.loaded.host.attach(update, "core/update")
        stack.callback(self.loaded.host.detach, "core/update")
        self._files = RunRecordFiles(self.directory, summarize_run(components, self.loaded))
        self._files.start(self.loaded.resolved(), self.state.step)

    def _start_trackers(self, stack: ExitStack) -> None:
        # A step whose evaluation is still to come gets its line when that is done.
        kept = self.state.step - (1 if self._resumed.pending is not None else 0)
        notes = (*self._notes, *self._files.data_notes())
        info = RunInfo(self.directory.path, kept, self.source.total_steps, self.loaded.resolved(), notes)
        for tracker in self._components.trackers.values():
            tracker.start(info)
            stack.callback(tracker.close)

    def _start_batches(self, stack: ExitStack) -> None:
        first = self.state.step + 1
        self.source.start(first, self.backend)
        # A batch that depends on the weights cannot be built ahead of the update before it.
        prefetch = self.config.prefetch if self.source.pure else SerialPrefetchConfig(name="core/serial")
        self.batches = self.loaded.host.registry.create(
            "prefetch", prefetch, build=self.source.build, last_step=self.source.total_steps
        )
        stack.callback(self.batches.close)
        self.batches.start(first)

    def _settle_resume(self) -> None:
        """Do what a resume owes before its first step."""
        if self._resumed.pending is not None:
            step = self.state.step
            metrics = {**self._resumed.pending}
            metrics |= self.maybe_evaluate(step, metrics)
            self.record(step, metrics)
            self._save(step)
        elif self._resumed.foreign:
            # A kill before the first own checkpoint must not leave this run without the weights it began with.
            self._save(self.state.step)

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to train, 1-based, until the last one or a stop signal."""
        while self.state.step < self.source.total_steps and not self._stop:
            yield self.state.step + 1

    def maybe_evaluate(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Evaluation metrics when this step is due for one, else nothing.

        metrics: of the update just done. When the evaluation fails, they are saved with the weights before the error
        goes on: a mistake in a reward must not cost the training before it. A resume evaluates first.
        """
        evaluation = self._components.data.evaluation
        if evaluation is None or not self._is_due(step, self.config.evaluation.every_steps):
            return {}
        try:
            scores, samples = evaluation.evaluate(self.backend)
        except Exception as error:
            self._save_before_evaluation(step, metrics, error)
            raise
        self._files.add_samples(step, samples)
        self.hooks.on_eval_end(step=step, metrics=MappingProxyType(scores))
        return scores

    def _save_before_evaluation(self, step: int, metrics: Mapping[str, float], error: Exception) -> None:
        try:
            self._save(step, pending=metrics)
        except Exception as failure:  # noqa: BLE001 - it must not hide the evaluation's own error
            error.add_note(f"The step before it could not be saved either: {failure}")
        else:
            error.add_note(f"Step {step} itself was trained and saved; the same command evaluates again and goes on.")

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Mark the step as done and send its metrics to every tracker."""
        self.state.step = step
        self.state.metrics = dict(metrics)
        for tracker in self._components.trackers.values():
            tracker.log(step, self.state.metrics)

    def maybe_checkpoint(self, step: int) -> None:
        """Save when this step is due for it, is the last one, or a stop was asked for."""
        if self._stop or self._is_due(step, self.config.checkpoint.every_steps):
            self._save(step)

    def _save(self, step: int, pending: Mapping[str, float] | None = None) -> None:
        """pending: metrics of this step, when its evaluation and metrics line are still to come."""
        for tracker in self._components.trackers.values():
            tracker.flush()
        self.state.checkpoint = save_state(step, self._components, self.loaded, self.directory, pending)
        self.state.saved_step = step
        self.hooks.on_checkpoint_saved(step=step, path=self.state.checkpoint)

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self.source.total_steps or (every is not None and step % every == 0)

    def _status(self) -> Literal["finished", "stopped"]:
        return "finished" if self.state.step >= self.source.total_steps else "stopped"

    def _export_if_finished(self) -> None:
        if self.config.checkpoint.export_hf and self._status() == "finished":
            tokenizer = self._components.data.context.tokenizer
            export_hf(self.backend, self.loaded, tokenizer, self.directory.exported_model, replace=True)

    def _end(self, error: BaseException | None) -> None:
        """Tell the hooks and write the status; a failure here never hides the error that ended the run."""
        try:
            self.hooks.on_run_end(run=self, error=error)
        except Exception as failure:
            if error is None:
                self._files.finish("failed", str(failure))
                raise
            error.add_note(f"on_run_end failed too: {type(failure).__name__}: {failure}")
        try:
            status = self._status() if error is None else "failed"
            self._files.finish(status, None if error is None else str(error), self.source.given_up())
        except OSError as failure:
            if error is None:
                raise RunFailedError(f"{self.directory.summary} cannot be written: {failure}.") from failure
            error.add_note(f"{self.directory.summary} could not be written either: {failure}")

    def _with_last_checkpoint(self, error: BaseException) -> BaseException:
        """A numerical failure also says what to resume from."""
        if not isinstance(error, NonFiniteLossError):
            return error
        kept = self.state.checkpoint
        where = f"The last good checkpoint is {kept}." if kept else "There was no checkpoint before it."
        return NonFiniteLossError(f"Step {self.state.step + 1}: {error} {where}")


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set while a run is to end after its current step. Signals are caught only inside `with` on the main thread."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt(f"second {signal.Signals(number).name}")
        self.signal = signal.Signals(number)
