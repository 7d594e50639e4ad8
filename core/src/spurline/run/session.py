"""Train a run from its first step to its last: run evaluations, record metrics and save checkpoints.

`Run` gives programs and hooks access to a session. The module `loop` calls its methods in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spurline.config.loading import LoadedConfig
from spurline.data.configs import SerialPrefetchConfig
from spurline.errors import RankFailedError, RunDirectoryError, RunDirectoryLostError, RunFailedError
from spurline.plugins.run_view import RunState, RunView, Warned
from spurline.progress import Progress
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.tracker import RunInfo
from spurline.run import loop
from spurline.run.build import Components, build_update, summarize_run
from spurline.run.checkpoints.resume import Resume, ResumeRequest, restore
from spurline.run.checkpoints.saving import Saving
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline.run.endings.ending import RunResult, Status, explained, go_on
from spurline.run.endings.stop_request import StopRequest
from spurline.run.evaluations.watched import BestSoFar, EarlyStop, StepScores


class Session:
    """The part of a run that trains. Its constructor restores the checkpoint of a resumed run.

    The constructor takes the open run directory. `stack` closes everything that the session starts.
    """

    batches: Prefetch
    """The prefetch. It exists from the first step on."""

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: RunDirectory,
        request: ResumeRequest,
        resume: Resume,
        components: Components,
        stop: StopRequest,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self.loaded, self.components = loaded, components
        self.hooks = loaded.host.hooks
        self.source, self.backend = components.data.source, components.backend
        self.tokenizer = components.data.context.tokenizer
        self.state = RunState()
        self.is_started = False
        """True once the source has been started."""
        self._config = loaded.config
        self._directory, self._resumed = directory, resume
        self._stop, self._progress, self._stack = stop, progress, stack
        self._best = BestSoFar(loaded.config.checkpoint.keep_best)
        self._early_stop = EarlyStop(loaded.config.stop_when)
        self._step_under_way: int | None = None
        self._is_over = False
        self._notes = [*components.notes, *resume.notes]
        checkpoint = resume.checkpoint
        if checkpoint is not None:
            progress("restoring the checkpoint")
            self._notes += restore(checkpoint, components, loaded, self._best, self._early_stop)
            self.state = RunState(checkpoint.step, checkpoint.step, checkpoint.path)
        elif note := directory.set_aside_earlier(self.source.records):
            self._notes.append(note)
        self._update = build_update(components, loaded, resume.done)
        # At the end, detach everything that hooks have attached for this run.
        stack.enter_context(loaded.host.attachments())
        loaded.host.attach(self._update, "core/update")
        history = {"history": list(resume.history)} if resume.history else {}
        self._files = RunRecordFiles(directory, summarize_run(components, loaded) | history)
        # -1 also drops the sample answers of step 0, which an earlier attempt may have written.
        self._files.start(loaded.resolved(), -1 if checkpoint is None else self.state.step)
        self.scores = StepScores(components.data.evaluations, self.backend, self._best, self._early_stop)
        self._saving = Saving(loaded, directory, components, self.state, self._course)
        # Once this run has ended, another run may use the directory, so this run must not publish a checkpoint.
        stack.callback(self._saving.abandon)
        self.judges: list[Callable[[], Sequence[Warned]]] = []
        """Functions that report problems of the whole run, for the summary and the result."""
        self._warnings: tuple[Warned, ...] = ()
        self._options = request.options()

    def train(self, run: RunView) -> None:
        """Train the remaining steps, then record how the run ended, even after an error. Hooks get `run`."""
        error: BaseException | None = None
        try:
            self.hooks.on_run_start(run=run)
            self._notes += self.components.hook_states.close()
            self._start_trackers()
            if not self.is_done or self._resumed.pending is not None:
                # Engines may take minutes to start. Nothing is trained yet, so a signal may interrupt the start.
                self._stop.cut_short(self.start_batches)
            if self._stop.signal is None:
                self._settle_start()
            loop.train(self)
            self._saving.take_written(wait=True)
            if self.state.step > self.state.saved_step:
                # The request to stop came after `maybe_checkpoint` of the last step.
                self._saving.save(self.state.step)
            self._directory.check_present()
            self._export_if_finished(run)
        except BaseException as raised:
            error = raised
            self._saving.settle(raised)
            error = explained(raised, self.state, self._go_on())
            if error is raised:
                raise
            raise error from raised
        finally:
            self._is_over = True
            self._end(run, error)

    def result(self, files: Mapping[str, Path]) -> RunResult:
        """Return the result of the run. `files` are the files that plugins made from the run's metrics."""
        model, adapter = self._exports() if self._status() == "finished" else (None, None)
        return RunResult(
            self._status(),
            self.state.step,
            self.state.metrics,
            self.state.checkpoint,
            self._stop.signal,
            self._stop_reason(),
            self._go_on(),
            self._best.facts(),
            tuple(warning.words for warning in self._warnings if warning.lasts),
            model,
            adapter,
            files,
        )

    def words_on_stop(self) -> str:
        """Return words that say how the run reacts to a request to stop."""
        if self._is_over:
            return "Training is over: closing what the run has opened"
        step = self._step_under_way
        if step is not None:
            return f"Finishing step {step:,} and saving"
        return "Finishing and saving" if self.is_done else f"Stopping before step {self.state.step + 1:,}"

    def _course(self, pending: Mapping[str, float] | None) -> dict[str, Any]:
        """Return facts about the run for a manifest. `pending` has the metrics of a step that is not evaluated yet."""
        facts = {
            "updates": dict(self._update.done),
            "history": list(self._resumed.history),
            "best": self._best.facts(),
            "early_stop": self._early_stop.facts(),
            "pending_evaluation": pending,
        }
        return {name: value for name, value in facts.items() if value}

    def _start_trackers(self) -> None:
        # If the last step still must be evaluated, its line in the record is not written yet.
        kept = self.state.step - (1 if self._resumed.pending is not None else 0)
        notes = (*self._notes, *self._files.data_notes())
        continues = self._resumed.checkpoint is not None
        info = RunInfo(self._directory.path, kept, self.source.total_steps, self.loaded.resolved(), notes, continues)
        for tracker in self.components.trackers.values():
            tracker.start(info)
            self._stack.callback(tracker.close)

    def start_batches(self) -> None:
        """Start the source, and begin to build batches ahead."""
        first = self.state.step + 1
        self.source.start(first, self.backend)
        self.is_started = True
        # If batches depend on the weights, they cannot be built ahead.
        prefetch = self._config.prefetch if self.source.pure else SerialPrefetchConfig(name="core/serial")
        self.batches = self.loaded.host.registry.create(
            "prefetch", prefetch, build=self.source.build, last_step=self.source.total_steps
        )
        self._stack.callback(self.batches.close)
        self.batches.start(first)

    def _settle_start(self) -> None:
        """Run the evaluations and save the checkpoint that are due before the first step."""
        if self._resumed.checkpoint is None:
            self._evaluate_before_training()
        elif self._resumed.pending is not None:
            step = self.state.step
            metrics = {**self._resumed.pending}
            self.scores.open()
            metrics |= self.maybe_evaluate(step, metrics)
            self.record(step, metrics)
            self.hooks.on_step_end(step=step, metrics=MappingProxyType(metrics))
            self._saving.save(step)
        elif self._resumed.foreign:
            # Save at once. If this process is killed, the next one must find the state with which this run began.
            self._saving.save(self.state.step)

    def _evaluate_before_training(self) -> None:
        """Record the evaluations with `at_start` as step 0. A run that begins again from step 0 repeats them."""
        due = [evaluation for evaluation in self.components.data.evaluations if evaluation.at_start]
        if due and not self._stop:
            self._progress("evaluating the model before its first step")
            self.scores.open()
            metrics = {"epoch": 0.0}
            self.record(0, metrics | self._evaluated(0, *self.scores.measure(0, due), metrics))

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps still to train, until the last one, a request to stop, or the end by `stop_when`."""
        while not self.is_done and not self._stop:
            self._directory.check_present()
            self.scores.open()
            self._step_under_way = self.state.step + 1
            yield self._step_under_way
            self._step_under_way = None

    def maybe_evaluate(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Run the evaluations that are due, and return their metrics and the metrics that hooks evaluated.

        If an evaluation fails, for example because of a mistake in a reward, a checkpoint with `metrics` is saved
        before the error is raised. A resumed run begins with the evaluations of this step. `metrics` are the metrics of
        the step's update.
        """
        evaluations = self.components.data.evaluations
        due = [evaluation for evaluation in evaluations if self._is_due(step, evaluation.every_steps)]
        if not due:
            return self.scores.beside(metrics)
        try:
            scores, samples = self.scores.measure(step, due)
        except RankFailedError:
            # The weights are lost with the ranks, so they cannot be saved.
            raise
        except Exception as error:
            self._saving.save_before(error, step, {**metrics, **self.scores.asked})
            raise
        return self._evaluated(step, scores, samples, metrics)

    def _evaluated(
        self, step: int, scores: dict[str, float], samples: Sequence[Mapping[str, Any]], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Record the answers and call the hooks. Returns all metrics, including those that hooks evaluated."""
        self._files.add_samples(step, samples)
        self.hooks.on_eval_end(step=step, metrics=MappingProxyType(scores))
        return {**scores, **self.scores.beside(metrics)}

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Mark the step as done and send its metrics to every tracker."""
        self.scores.close()
        self._directory.check_present()
        for tracker in self.components.trackers.values():
            tracker.log(step, dict(metrics))
        # A step is done only if its line could be written, so set this last.
        self.state.step = step
        self.state.metrics = dict(metrics)

    def maybe_checkpoint(self, step: int) -> None:
        """Save a checkpoint if one is due: by the settings, after the best evaluation so far, or at the end of the run.

        With `checkpoint.async`, checkpoints are written while training goes on, except at the end of the run.
        """
        self._saving.take_written(wait=False)
        is_due = self._is_due(step, self._config.checkpoint.every_steps)
        if self._stop or self.is_done or self._saving.is_time() or is_due or self._best.step == step:
            goes_on = not self._stop and not self.is_done
            self._saving.save(step, beside=self._config.checkpoint.is_async and goes_on)

    def saving_metrics(self) -> dict[str, float]:
        """Return the seconds that training has waited for asynchronous checkpoints since the last call."""
        return self._saving.metrics()

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self.source.total_steps or (every is not None and step % every == 0)

    @property
    def is_done(self) -> bool:
        """Return whether there is no further step to train: the last one was made, or `stop_when` ended the run."""
        return self.state.step >= self.source.total_steps or self._early_stop.reason is not None

    def _status(self) -> Status:
        # If a signal stopped the start, the pending evaluation of the last step is still to come.
        is_owed = self._resumed.pending is not None and not self.state.metrics
        return "finished" if self.is_done and not is_owed else "stopped"

    def _stop_reason(self) -> str | None:
        if self.state.step >= self.source.total_steps:
            return None
        return self._early_stop.reason or self._stop.reason

    def _exports(self) -> tuple[Path | None, Path | None]:
        """Return the folders of the exported model and adapter. A folder is None if the config does not export it."""
        wanted, folders = self._config.checkpoint, self._directory
        model = folders.exported_model if wanted.export_hf else None
        return model, folders.exported_adapter if wanted.export_adapter else None

    def _export_if_finished(self, run: RunView) -> None:
        if self._status() != "finished":
            return
        for path, export in zip(self._exports(), (run.export, run.export_adapter), strict=True):
            # If this process trained no step, the run had finished before. Keep the export that the run made then.
            if path is not None and (self.state.metrics or not path.exists()):
                export(path, replace=True)

    def _end(self, run: RunView, error: BaseException | None) -> None:
        """Call `on_run_end` and write the status. A failure here never hides the error that ended the run."""
        try:
            self.hooks.on_run_end(run=run, error=error)
        except Exception as failure:
            if error is None:
                self._record_end(failure)
                raise
            error.add_note(f"on_run_end failed too: {type(failure).__name__}: {failure}")
        self._record_end(error)

    def _record_end(self, error: BaseException | None) -> None:
        """Write how the run ended. A failure here never hides the error that ended it."""
        status = self._status()
        if error is not None:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        summary = self._directory.summary
        try:
            # Another folder may have taken the place of the run directory.
            self._directory.check_present()
            self._warnings = tuple(warning for judge in self.judges for warning in judge())
            self._files.summary["warnings"] = [asdict(warning) for warning in self._warnings]
            if error is None and (reason := self._stop_reason()) is not None:
                self._files.summary["stop_reason"] = reason
            self._files.finish(status, None if error is None else str(error), self.source.given_up())
        except RunDirectoryLostError:
            if error is None:
                raise
        except (OSError, RunDirectoryError) as failure:
            if error is None:
                raise RunFailedError(f"{summary} cannot be written: {failure}.") from failure
            error.add_note(f"{summary} could not be written either: {failure}")

    def _go_on(self) -> str:
        """Return a sentence on how to continue. Its command has this command's options until a checkpoint is saved."""
        return go_on(self.loaded, () if self._saving.has_saved else self._options)
