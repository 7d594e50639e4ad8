"""One run from config to result: builds the components, restores a checkpoint, trains, writes the record.

`Run(load_config("run.yaml")).train()` is the whole Python API; the command line does the same. SIGINT and SIGTERM ask a
run to stop after the step it is in, which is said at once; a second one stops it at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Literal

from spurline.config.loading import LoadedConfig
from spurline.data.configs import SerialPrefetchConfig
from spurline.errors import NonFiniteLossError, RunDirectoryLostError, RunFailedError
from spurline.protocols.backend import Backend
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.source import BatchSource
from spurline.protocols.tracker import RunInfo
from spurline.report.page import write_run_report
from spurline.run import loop
from spurline.run.best import BestSoFar
from spurline.run.build import build_components, build_update, summarize_run
from spurline.run.changes import ResumeRequest
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline.run.export import export_hf
from spurline.run.rescue import rescue
from spurline.run.resume import Resume, RunRecord, find_resume, restore, save_state


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
    go_on: how to continue a stopped run, as a sentence.
    """

    status: Literal["finished", "stopped"]
    step: int
    metrics: Mapping[str, float]
    checkpoint: Path | None
    report: Path | None
    signal: signal.Signals | None = None
    go_on: str = ""


class Run:
    """One training run. `source`, `backend` and `batches` exist while `train` runs; hooks get the run as an argument.

    resume: `auto` continues from the latest checkpoint of run_dir if there is one; `never` refuses a run_dir that has
    one; anything else is the path of a checkpoint folder. allow_change: settings that may differ from the checkpoint's
    although they change how the run trains, such as `optimizer.learning_rate`; each such change is kept in its history.
    """

    source: BatchSource
    backend: Backend
    batches: Prefetch

    def __init__(self, loaded: LoadedConfig, resume: str = "auto", allow_change: Sequence[str] = ()) -> None:
        self.loaded = loaded
        self.config = loaded.config
        self.hooks = loaded.host.hooks
        self.directory = RunDirectory(loaded.config.run_dir)
        self.state = RunState()
        self._request = ResumeRequest(resume, tuple(allow_change))
        self._resumed = Resume(None)
        self._notes: list[str] = []
        self._best = BestSoFar(loaded.config.checkpoint.keep_best)
        self._saved_at = time.monotonic()
        self._has_saved = False
        self._step_under_way: int | None = None
        self._updated = RunState()
        self._stop = StopRequest(self._words_on_stop)

    def train(self) -> RunResult:
        """Train to the end or to a stop signal. Raises SpurlineError; what was saved before an error is intact.

        Signals are caught once training begins; before that there is nothing to save, and they act as usual.
        """
        with ExitStack() as stack:
            self.directory.open()
            stack.callback(self.directory.close)
            try:
                self._build(stack)
            except KeyboardInterrupt:
                text = f"Interrupted before training began; nothing in {self.directory.path} is lost."
                raise KeyboardInterrupt(f"{text} {self._go_on()}") from None
            stack.enter_context(self._stop)
            self._saved_at = time.monotonic()
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
                self.directory.check_present()
            except BaseException as raised:
                error = self._explained(raised)
                if error is raised:
                    raise
                raise error from raised
            finally:
                self._end(error)
            report = write_run_report(self.loaded, self.directory) if self.config.report.enabled else None
            return RunResult(
                self._status(),
                self.state.step,
                self.state.metrics,
                self.state.checkpoint,
                report,
                self._stop.signal,
                self._go_on(),
            )

    def _build(self, stack: ExitStack) -> None:
        resume = self._resumed = find_resume(self.directory, self.loaded, self._request)
        components = self._components = build_components(self.loaded, stack)
        self.directory.check_present()
        self.source, self.backend = components.data.source, components.backend
        self._notes = [*resume.notes]
        if resume.checkpoint is not None:
            self._notes += restore(resume.checkpoint, components, self.loaded, self._best)
            self.state = RunState(resume.checkpoint.step, resume.checkpoint.step, resume.checkpoint.path)
        elif note := self.directory.set_aside_earlier(self.source.records):
            self._notes.append(note)
        update = build_update(components, self.loaded)
        self.loaded.host.attach(update, "core/update")
        stack.callback(self.loaded.host.detach, "core/update")
        history = {"history": list(resume.history)} if resume.history else {}
        self._files = RunRecordFiles(self.directory, summarize_run(components, self.loaded) | history)
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
            self.directory.check_present()
            self._step_under_way = self.state.step + 1
            yield self._step_under_way
            self._step_under_way = None

    def after_update(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Let the source go on with the new weights. metrics: of the update just done. Returns further ones."""
        self._updated = RunState(step, metrics=dict(metrics))
        return self.source.after_update(step, self.backend)

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
            self._best.observe(step, scores)
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
        self.directory.check_present()
        for tracker in self._components.trackers.values():
            tracker.log(step, self.state.metrics)

    def maybe_checkpoint(self, step: int) -> None:
        """Save when steps or minutes say so, after the last step and the best one so far, and before a stop."""
        minutes = self.config.checkpoint.every_minutes
        is_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        if self._stop or is_time or self._best.step == step or self._is_due(step, self.config.checkpoint.every_steps):
            self._save(step)

    def _save(self, step: int, pending: Mapping[str, float] | None = None) -> None:
        """pending: metrics of this step, when its evaluation and metrics line are still to come."""
        self.directory.check_present()
        for tracker in self._components.trackers.values():
            tracker.flush()
        record = RunRecord(self._resumed.history, self._best, pending)
        self.state.checkpoint = save_state(step, self._components, self.loaded, self.directory, record)
        self.state.saved_step, self._saved_at, self._has_saved = step, time.monotonic(), True
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
            failed = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            status = self._status() if error is None else failed
            self._files.finish(status, None if error is None else str(error), self.source.given_up())
        except OSError as failure:
            if error is None:
                raise RunFailedError(f"{self.directory.summary} cannot be written: {failure}.") from failure
            error.add_note(f"{self.directory.summary} could not be written either: {failure}")

    def _explained(self, error: BaseException) -> BaseException:
        """What ended the run, with what is left of it and how to go on."""
        lost = error if isinstance(error, RunDirectoryLostError) else self._loss_behind(error)
        if lost is not None:
            return self._rescued(lost)
        kept = self.state.checkpoint
        if isinstance(error, KeyboardInterrupt):
            where = f"The last checkpoint is {kept}." if kept else "There is no checkpoint."
            return KeyboardInterrupt(f"Stopped at once, after step {self.state.step:,}. {where} {self._go_on()}")
        if isinstance(error, NonFiniteLossError):
            where = f"The last good checkpoint is {kept}." if kept else "There was no checkpoint before it."
            return NonFiniteLossError(f"Step {self.state.step + 1}: {error} {where}")
        return error

    def _loss_behind(self, error: BaseException) -> RunDirectoryLostError | None:
        """The loss of the run directory, when that is why something else failed between two updates."""
        if not isinstance(error, Exception) or self._updated.step != self._step_under_way:
            return None
        try:
            self.directory.check_present()
        except RunDirectoryLostError as lost:
            return lost
        return None

    def _rescued(self, error: RunDirectoryLostError) -> RunDirectoryLostError:
        """Save the last update elsewhere, and go on with the record of the run there."""
        step = max(self.state.step, self._updated.step)
        # What the update measured, where its evaluation or its metrics line had not come yet.
        pending = self._updated.metrics if step > self.state.step else None
        if step == 0:
            return RunDirectoryLostError(f"{error} No step was finished yet, so nothing is lost. {self._go_on()}")

        def save(directory: RunDirectory) -> None:
            record = RunRecord(self._resumed.history, pending=pending)
            self.state.checkpoint = save_state(step, self._components, self.loaded, directory, record)
            files = RunRecordFiles(directory, self._files.summary)
            files.start(self.loaded.resolved() | {"run_dir": str(directory.path)}, step)
            self._files = files

        directory, failures = rescue(self.directory.path, step, save)
        told = [str(error), *failures]
        if directory is None:
            told.append(f"Step {step:,} could not be saved anywhere.")
        else:
            command = self.loaded.train_command("--set", f"run_dir={directory.path}")
            how = f"Go on with: {command}" if command is not None else "Train the same config with that run_dir."
            told.append(f"Step {step:,} is saved in {directory.path}, without the metrics before it. {how}")
        return RunDirectoryLostError(" ".join(told))

    def _go_on(self) -> str:
        """How to continue from what is saved by now. The checkpoints of this run know what it was allowed to change."""
        options = [] if self._has_saved else self._request.options()
        command = self.loaded.train_command(*options)
        return f"Go on with: {command}" if command is not None else "Train the same config again to go on."

    def _words_on_stop(self) -> str:
        step = self._step_under_way
        if step is not None:
            return f"Finishing step {step:,} and saving"
        done = self.state.step >= self.source.total_steps
        return "Finishing and saving" if done else f"Stopping before step {self.state.step + 1:,}"


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set while a run is to end after its current step. Signals are caught only inside `with` on the main thread.

    words: what the run does about it, as the beginning of a sentence; said as soon as a signal arrives.
    """

    def __init__(self, words: Callable[[], str]) -> None:
        self.signal: signal.Signals | None = None
        self._words = words
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
        again = "press Ctrl-C again to stop now" if number == signal.SIGINT else "a second signal stops it now"
        # On a terminal `^C` stands on the line. Not through sys.stderr, in whose own work this may have come.
        begin = "\n" if os.isatty(2) else ""
        # The run ends in order also when nobody reads its messages.
        with suppress(OSError):
            os.write(2, f"{begin}{self._words()}; {again}.\n".encode())
