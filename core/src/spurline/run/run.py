"""One run from config to result: builds the components, restores a checkpoint, trains, writes the record.

`Run(load_config("run.yaml")).train()` is what the command line does. Hooks get the run too: the class says what they
can do with it. SIGINT, SIGTERM and SIGHUP ask a run to stop after the step it is in, which is said at once; a second
one stops it at once, where it can still answer; `second_signal` ends the command where it cannot.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from spurline.config.loading import LoadedConfig
from spurline.data.configs import SerialPrefetchConfig
from spurline.errors import (
    ConfigError,
    NonFiniteLossError,
    RankFailedError,
    RunDirectoryError,
    RunDirectoryLostError,
    RunFailedError,
    UserError,
)
from spurline.progress import Progress, silent
from spurline.protocols.backend import Backend, LendsParameters
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.source import BatchSource
from spurline.protocols.stateful import Stateful
from spurline.protocols.tracker import RunInfo
from spurline.report.page import write_run_report
from spurline.run import loop
from spurline.run.best import BestSoFar
from spurline.run.build import build_components, build_update, summarize_run
from spurline.run.changes import ResumeRequest
from spurline.run.checkpoint import CheckpointStore
from spurline.run.checkpoint_writer import CheckpointWriter
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline.run.early_stop import EarlyStop
from spurline.run.evaluation import ScheduledEvaluation, run_all
from spurline.run.event_loop import own_event_loops
from spurline.run.export import export_adapter, export_hf
from spurline.run.health import findings, trained_steps
from spurline.run.hook_state import HookStates
from spurline.run.on_step import OnStep, OnStepHook
from spurline.run.rescue import rescue
from spurline.run.resume import CheckpointContents, Course, Resume, find_resume, restore, save_state
from spurline.run.stop_request import StopRequest
from spurline.trackers.frame import metrics_frame
from spurline.trackers.jsonl import read_json_lines

if TYPE_CHECKING:
    import pandas
    from transformers import PreTrainedTokenizerBase


@dataclass
class RunState:
    """Where a run is. step: last finished step. checkpoint: newest one of this run, if any, which covers saved_step;
    one that is still being written is none."""

    step: int = 0
    saved_step: int = 0
    checkpoint: Path | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    status: `finished`, or `stopped` by a signal after a checkpoint. metrics: of the last step.
    checkpoint: the newest one. report: the HTML page, if written. signal: what stopped the run, if anything.
    stop_reason: what `request_stop` was given, if that stopped the run; why `stop_when` finished it early.
    best: `metric`, `step` and `value` of the best evaluation so far, with `checkpoint.keep_best`.
    warnings: what was off and lasted, in sentences; the report also has what passed by.
    go_on: how to continue a stopped run, as a sentence.
    """

    status: Literal["finished", "stopped"]
    step: int
    metrics: Mapping[str, float]
    checkpoint: Path | None
    report: Path | None
    signal: Signals | None = None
    stop_reason: str | None = None
    go_on: str = ""
    best: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()


class Run:
    """One training run, and what a program or a hook can do with it. Hooks get it in `on_run_start`.

    resume: `auto` continues from the latest checkpoint of run_dir if there is one; `never` refuses a run_dir that has
    one; anything else is the path of a checkpoint folder. allow_change: settings that may differ from the checkpoint's
    although they change how the run trains, such as `optimizer.learning_rate`; each such change is kept in its history.
    progress: told what the start is doing; silent by default.
    on_step: called after each step with its number and metrics, a function or several; as a hook of the program it may
    raise, which ends the run, or call `request_stop`. One that has a method `close` is told when the run has ended.

    Always there:
        config: RunConfig, every setting, frozen; a plugin's section is `getattr(run.config, "NAME")`.
        loaded: LoadedConfig, the same with the plugin host; `loaded.host.attach` adds hooks to this run.
        hooks: calls all implementations of a hook, `run.hooks.on_step_start(step=1)`.
        directory: RunDirectory, the paths of what the run writes; `directory.path` is run_dir.
        state: RunState, the last finished step with its metrics, and the newest checkpoint.
    While `train` runs, from `on_run_start` to `on_run_end`:
        backend: Backend, which holds the model; see `spurline.protocols.backend` for what some can besides.
        source: BatchSource, where batches come from; `source.total_steps` is the length of the run.
        tokenizer: the tokenizer of the model, of Hugging Face transformers.
        batches: Prefetch, which hands out the batches; from the first step on.
    All methods but `keep_state` are for the loop's thread, which is the one that calls hooks.
    """

    source: BatchSource
    backend: Backend
    batches: Prefetch
    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self,
        loaded: LoadedConfig,
        resume: str = "auto",
        allow_change: Sequence[str] = (),
        progress: Progress = silent,
        on_step: OnStep | Sequence[OnStep] = (),
    ) -> None:
        self.loaded = loaded
        self.config = loaded.config
        self.hooks = loaded.host.hooks
        self.directory = RunDirectory(loaded.config.run_dir)
        self.state = RunState()
        self._request = ResumeRequest(resume, tuple(allow_change))
        self._progress = progress
        self._on_step = OnStepHook(on_step)
        self._resumed = Resume(None)
        self._notes: list[str] = []
        self._best = BestSoFar(loaded.config.checkpoint.keep_best)
        self._early_stop = EarlyStop(loaded.config.stop_when)
        self._saved_at = time.monotonic()
        self._has_saved = False
        self._writer = CheckpointWriter()
        self._step_under_way: int | None = None
        self._updated = RunState()
        self._stop = StopRequest(self._words_on_stop)
        self._hook_states = HookStates()
        self._is_started = False
        self._scores: dict[str, float] | None = None
        """What hooks have evaluated in the step under way; None between the record of a step and the next one."""

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "backend", "batches", "tokenizer"):
            raise AttributeError(f"Run.{name} exists while the run trains. Read it in a hook, such as on_step_start.")
        raise AttributeError(f"'Run' object has no attribute '{name}'")

    def train(self) -> RunResult:
        """Train to the end or to a stop signal. Raises SpurlineError; what was saved before an error is intact.

        Signals are caught once training begins; before that there is nothing to save, and they act as usual.
        """
        with ExitStack() as stack:
            stack.enter_context(own_event_loops())
            self.directory.open()
            stack.callback(self.directory.close)
            # Whatever ended the run: nothing is renamed into a directory that another run may hold.
            stack.callback(self._writer.abandon)
            try:
                self._build(stack)
            except KeyboardInterrupt:
                text = f"Interrupted before training began; nothing in {self.directory.path} is lost."
                raise KeyboardInterrupt(f"{text} {self._go_on()}") from None
            stack.enter_context(self._stop)
            self._saved_at = time.monotonic()
            error: BaseException | None = None
            try:
                self.hooks.on_run_start(run=self)
                self._notes += self._hook_states.close()
                self._start_trackers(stack)
                self._start_batches(stack)
                self._settle_start()
                loop.train(self)
                self._take_written(wait=True)
                if self.state.step > self.state.saved_step:
                    # A stop was asked for after the last step had its chance to save.
                    self._save(self.state.step)
                self._export_if_finished()
                self.directory.check_present()
            except BaseException as raised:
                # What ended the run stands, also where saving the rest of it fails in a way of its own.
                error = raised
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
                self._stop_reason(),
                self._go_on(),
                self._best.facts(),
                tuple(found["words"] for found in self._files.summary["warnings"] if found["lasts"]),
            )

    def keep_state(self, name: str, state: Stateful) -> None:
        """Save the state of a plugin in every checkpoint, under `hooks/PLUGIN/NAME`, and restore it on a resume.

        Call it in `on_run_start`, in new and resumed runs alike: in a resumed one, `state.load_state_dict` has got what
        the checkpoint holds when this returns. A program may also call it before `train`.
        name: one of the plugin's own. state: what its `state_dict` returns is nested dicts and lists of JSON values and
        numpy arrays; it is asked for when a checkpoint is written, after the step's `on_step_end`.
        Raises PluginError for a name that is taken, for what is no `Stateful`, and once training has begun.
        """
        self._hook_states.keep(self.loaded.host.calls.plugin, name, state)

    def evaluate(self, prefix: str) -> dict[str, float]:
        """Make every evaluation of the run now, with the weights that the backend has at this moment.

        Returns their metrics with `PREFIX/` in place of `eval/`: `ema/loss`. Called between
        `on_step_start` and the end of `on_eval_end`, they are also recorded with those of the step. Fires no hook and
        keeps no sample answers.
        Raises UserError when there is no held-out data or the prefix is taken, RunFailedError before the first step and
        where the evaluation asks engines with weights of their own while the backend's are swapped.
        """
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", prefix) or prefix == "eval":
            raise UserError(
                f"run.evaluate({prefix!r}): a prefix is letters, digits, dots, dashes and underscores, and not 'eval'."
            )
        if not self._is_started:
            raise RunFailedError(
                f"run.evaluate({prefix!r}) came before the run has started its source. Call it in on_step_start or "
                "later."
            )
        evaluations = self._components.data.evaluations
        if not evaluations:
            what = f"is empty, and run.evaluate({prefix!r}) needs held-out data. Set it, or add `evaluations`."
            raise ConfigError.at("data.eval", what)
        swapped = isinstance(self.backend, LendsParameters) and self.backend.is_swapped
        if swapped and any(evaluation.held_out.measures_copies for evaluation in evaluations):
            raise RunFailedError(
                f"run.evaluate({prefix!r}): the answers come from engines with weights of their own, so the parameters "
                "swapped in the backend would not count. Use source: rollouts, or evaluate an export."
            )
        scores, _ = run_all(evaluations, self.backend)
        renamed = {f"{prefix}/{name.removeprefix('eval/')}": value for name, value in scores.items()}
        if self._scores is not None:
            if taken := sorted(renamed.keys() & self._scores.keys()):
                raise UserError(
                    f"run.evaluate({prefix!r}): this step has a '{taken[0]}' already. Give each evaluation of a step a "
                    "prefix of its own."
                )
            self._scores |= renamed
        return renamed

    def export(self, path: Path | str, *, replace: bool = False) -> Path:
        """Write the weights that the backend has at this moment as a Hugging Face folder, adapters merged.

        path: a new or empty folder, which is returned. replace: remove what is there. Raises UserError when something
        is there that may not be replaced.
        """
        return export_hf(self.backend, self.loaded, self.tokenizer, Path(path), replace=replace)

    def export_adapter(self, path: Path | str, *, replace: bool = False) -> Path:
        """Write the adapter that the backend has at this moment as a folder that `PeftModel.from_pretrained` loads.

        path, replace: as for `export`. Also raises UserError for a run without `backend.lora`.
        """
        return export_adapter(self.backend, self.loaded, self.tokenizer, Path(path), replace=replace)

    def metrics_frame(self) -> pandas.DataFrame:
        """What the run has recorded so far as a pandas DataFrame: a row for each step, indexed by `step`, a column for
        each metric. Also after the run, and of what an earlier process has done of it. Raises UserError without
        pandas."""
        return metrics_frame(self.directory.path)

    def request_stop(self, reason: str) -> None:
        """End the run in good order after the step it is in: with a checkpoint, a report and status `stopped`.

        reason: for people; on the terminal, in summary.json and in the result. The first one given stands. The same
        command trains on from there.
        """
        self._stop.reason = self._stop.reason or reason or "no reason was given"

    def _build(self, stack: ExitStack) -> None:
        resume = self._resumed = find_resume(self.directory, self.loaded, self._request)
        built = build_components(self.loaded, stack, self._progress, resume.done)
        components = replace(built, hook_states=self._hook_states)
        self._components = components
        self.directory.check_present()
        self.source, self.backend = components.data.source, components.backend
        self.tokenizer = components.data.context.tokenizer
        self._notes = [*components.notes, *resume.notes]
        if resume.checkpoint is not None:
            self._progress("restoring the checkpoint")
            self._notes += restore(resume.checkpoint, components, self.loaded, self._best, self._early_stop)
            self.state = RunState(resume.checkpoint.step, resume.checkpoint.step, resume.checkpoint.path)
        elif note := self.directory.set_aside_earlier(self.source.records):
            self._notes.append(note)
        self._update = build_update(components, self.loaded, resume.done)
        self.loaded.host.attach(self._update, "core/update")
        stack.callback(self.loaded.host.detach, "core/update")
        self.loaded.host.attach(self._on_step, "on_step")
        stack.callback(self.loaded.host.detach, "on_step")
        history = {"history": list(resume.history)} if resume.history else {}
        self._files = RunRecordFiles(self.directory, summarize_run(components, self.loaded) | history)
        # A new run keeps no answers, not even those of step 0 that an earlier attempt left.
        self._files.start(self.loaded.resolved(), -1 if resume.checkpoint is None else self.state.step)

    def _start_trackers(self, stack: ExitStack) -> None:
        # A step whose evaluation is still to come gets its line when that is done.
        kept = self.state.step - (1 if self._resumed.pending is not None else 0)
        notes = (*self._notes, *self._files.data_notes())
        continues = self._resumed.checkpoint is not None
        info = RunInfo(self.directory.path, kept, self.source.total_steps, self.loaded.resolved(), notes, continues)
        for tracker in self._components.trackers.values():
            tracker.start(info)
            stack.callback(tracker.close)

    def _start_batches(self, stack: ExitStack) -> None:
        first = self.state.step + 1
        self.source.start(first, self.backend)
        self._is_started = True
        # A batch that depends on the weights cannot be built ahead of the update before it.
        prefetch = self.config.prefetch if self.source.pure else SerialPrefetchConfig(name="core/serial")
        self.batches = self.loaded.host.registry.create(
            "prefetch", prefetch, build=self.source.build, last_step=self.source.total_steps
        )
        stack.callback(self.batches.close)
        self.batches.start(first)

    def _settle_start(self) -> None:
        """Measure the model that a new run begins with, or do what a resume owes before its first step."""
        if self._resumed.checkpoint is None:
            self._evaluate_before_training()
        elif self._resumed.pending is not None:
            step = self.state.step
            metrics = {**self._resumed.pending}
            self._scores = {}
            metrics |= self.maybe_evaluate(step, metrics)
            self.record(step, metrics)
            self.hooks.on_step_end(step=step, metrics=MappingProxyType(metrics))
            self._save(step)
        elif self._resumed.foreign:
            # A kill before the first own checkpoint must not leave this run without the weights it began with.
            self._save(self.state.step)

    def _evaluate_before_training(self) -> None:
        """What evaluations with `at_start` measure, recorded as step 0. No checkpoint covers it: a run that is killed
        before its first one starts again with an empty record, and measures again."""
        due = [evaluation for evaluation in self._components.data.evaluations if evaluation.at_start]
        if due and not self._stop:
            self._progress("evaluating the model before its first step")
            self._scores = {}
            metrics = {"epoch": 0.0}
            self.record(0, metrics | self._evaluated(0, *self._evaluate(0, due), metrics))

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to train, 1-based, until the last one, a stop signal, or the end that `stop_when` asks for."""
        while not self.is_done and not self._stop:
            self.directory.check_present()
            self._scores = {}
            self._step_under_way = self.state.step + 1
            yield self._step_under_way
            self._step_under_way = None

    def after_update(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Let the source go on with the new weights. metrics: of the update just done. Returns further ones."""
        self._updated = RunState(step, metrics=dict(metrics))
        return self.source.after_update(step, self.backend)

    def maybe_evaluate(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of all evaluations that this step is due for, and those of `evaluate`.

        metrics: of the update just done. When the evaluation fails, they are saved with the weights before the error
        goes on: a mistake in a reward must not cost the training before it. A resume evaluates first.
        """
        every = self._components.data.evaluations
        due = [evaluation for evaluation in every if self._is_due(step, evaluation.every_steps)]
        if not due:
            return self._scores_beside(metrics)
        try:
            scores, samples = self._evaluate(step, due)
            rest = [evaluation for evaluation in every if evaluation not in due]
            if rest and self._early_stop.reason is not None:
                # Each runs at the end, and this is it.
                further, answers = self._evaluate(step, rest)
                scores, samples = scores | further, samples + answers
        except RankFailedError:
            # Its weights have gone with the ranks.
            raise
        except Exception as error:
            self._save_before_evaluation(step, {**metrics, **(self._scores or {})}, error)
            raise
        return self._evaluated(step, scores, samples, metrics)

    def _evaluate(self, step: int, due: Sequence[ScheduledEvaluation]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics and sample answers of these evaluations; what goes by a metric is told of it."""
        scores, samples = run_all(due, self.backend)
        labels = [evaluation.label for evaluation in due]
        every = [evaluation.label for evaluation in self._components.data.evaluations]
        self._early_stop.observe(step, scores, labels, every)
        self._best.observe(step, scores, labels, every)
        return scores, samples

    def _evaluated(
        self, step: int, scores: dict[str, float], samples: Sequence[Mapping[str, Any]], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Keep the answers and tell the hooks; returns all metrics of evaluations, those that hooks made included.

        metrics: of the step besides.
        """
        self._files.add_samples(step, samples)
        self.hooks.on_eval_end(step=step, metrics=MappingProxyType(scores))
        return {**scores, **self._scores_beside(metrics)}

    def _scores_beside(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What hooks have evaluated in this step. Raises UserError when the step's own metrics have such a name."""
        scores = dict(self._scores or {})
        if taken := sorted(scores.keys() & metrics.keys()):
            raise UserError(
                f"run.evaluate: the metric '{taken[0]}' is one of the step's own. Evaluate under another prefix."
            )
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
        self.loaded.host.calls.check_recorded(metrics)
        self._scores = None
        self.directory.check_present()
        for tracker in self._components.trackers.values():
            tracker.log(step, dict(metrics))
        # Last: a step whose line cannot be written is not done, and a rescue of the run owes it that line.
        self.state.step = step
        self.state.metrics = dict(metrics)

    def maybe_checkpoint(self, step: int) -> None:
        """Save when steps or minutes say so, after the last step and the best one so far, and before a stop.

        With `checkpoint.async` what is saved between steps is written while training goes on.
        """
        self._take_written(wait=False)
        minutes = self.config.checkpoint.every_minutes
        is_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        is_due = self._is_due(step, self.config.checkpoint.every_steps)
        if self._stop or self.is_done or is_time or is_due or self._best.step == step:
            goes_on = not self._stop and not self.is_done
            self._save(step, beside=self.config.checkpoint.is_async and goes_on)

    def saving_metrics(self) -> dict[str, float]:
        """Seconds that checkpoints beside training have taken from it since the last call."""
        return self._writer.metrics()

    def _save(self, step: int, pending: Mapping[str, float] | None = None, *, beside: bool = False) -> None:
        """pending: metrics of this step, when its evaluation and metrics line are still to come. beside: copy what is
        to be saved, and let it be written while training goes on."""
        self.directory.check_present()
        self._take_written(wait=True)
        for tracker in self._components.trackers.values():
            tracker.flush()
        self.source.flush()
        course = Course(self._update.done, self._resumed.history, self._best, self._early_stop, pending)
        if beside:
            with self._writer.copying():
                contents = CheckpointContents.of(step, self._components, self.loaded, course, copied=True)
            store = CheckpointStore(self.directory.checkpoints)
            self._writer.start(contents, store, self.directory.check_present)
        else:
            self._saved(step, save_state(step, self._components, self.loaded, self.directory, course))
        self._saved_at = time.monotonic()

    def _take_written(self, *, wait: bool) -> None:
        """Take note of the checkpoint that was written beside training, if there is one. Raises what became of it."""
        written = self._writer.taken(wait=wait)
        if written is not None:
            self._saved(*written)

    def _saved(self, step: int, path: Path) -> None:
        self.state.checkpoint, self.state.saved_step, self._has_saved = path, step, True
        self.hooks.on_checkpoint_saved(step=step, path=path)

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self.source.total_steps or (every is not None and step % every == 0)

    @property
    def is_done(self) -> bool:
        """Whether there is no further step to train: the last one was made, or `stop_when` ended the run."""
        return self.state.step >= self.source.total_steps or self._early_stop.reason is not None

    def _status(self) -> Literal["finished", "stopped"]:
        return "finished" if self.is_done else "stopped"

    def _stop_reason(self) -> str | None:
        if self.state.step >= self.source.total_steps:
            return None
        return self._early_stop.reason or self._stop.reason

    def _export_if_finished(self) -> None:
        if self._status() != "finished":
            return
        if self.config.checkpoint.export_hf:
            self.export(self.directory.exported_model, replace=True)
        if self.config.checkpoint.export_adapter:
            self.export_adapter(self.directory.exported_adapter, replace=True)

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
            self._files.summary["warnings"] = self._warnings()
            if error is None and self._stop_reason() is not None:
                self._files.summary["stop_reason"] = self._stop_reason()
            self._files.finish(status, None if error is None else str(error), self.source.given_up())
        except (OSError, RunDirectoryError) as failure:
            if error is None:
                raise RunFailedError(f"{self.directory.summary} cannot be written: {failure}.") from failure
            error.add_note(f"{self.directory.summary} could not be written either: {failure}")

    def _warnings(self) -> list[dict[str, Any]]:
        """What was off at any step, as the report says it."""
        lines = read_json_lines(self.directory.metrics)
        steps = trained_steps(lines)
        return [
            {"kind": found.kind, "words": f"{found.words} {found.when(steps)}.", "lasts": found.lasts}
            for found in findings(lines, self.loaded.resolved())
        ]

    def _explained(self, error: BaseException) -> BaseException:
        """What ended the run, with what is left of it and how to go on."""
        self._settle_writing(error)
        lost = error if isinstance(error, RunDirectoryLostError) else self._loss_behind(error)
        if lost is not None:
            return self._rescued(lost)
        kept = self.state.checkpoint
        where = f"The last checkpoint is {kept}." if kept else "There is no checkpoint."
        if isinstance(error, RankFailedError):
            error.add_note(f"{where} {self._go_on()}")
        if isinstance(error, KeyboardInterrupt):
            return KeyboardInterrupt(f"Stopped at once, after step {self.state.step:,}. {where} {self._go_on()}")
        if isinstance(error, NonFiniteLossError):
            where = f"The last good checkpoint is {kept}." if kept else "There was no checkpoint before it."
            return NonFiniteLossError(f"Step {self.state.step + 1}: {error} {where}")
        return error

    def _settle_writing(self, error: BaseException) -> None:
        """See what becomes of a checkpoint that is being written when the run fails: it stands, and so it is said."""
        if isinstance(error, KeyboardInterrupt):
            written = self._writer.abandon()
            if written is not None:
                self.state.saved_step, self.state.checkpoint = written
            return
        try:
            self._take_written(wait=True)
        except Exception as failure:  # noqa: BLE001 - it must not hide the error that ended the run
            # It may be whole: a hook that was told of it fails here as well.
            error.add_note(f"Ending the checkpoint under way failed too: {failure}")

    def _loss_behind(self, error: BaseException) -> RunDirectoryLostError | None:
        """The loss of the run directory, when that is why something else failed between two updates."""
        if not isinstance(error, Exception) or self._step_under_way not in (None, self._updated.step):
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
            course = Course(self._update.done, self._resumed.history, early_stop=self._early_stop, pending=pending)
            self.state.checkpoint = save_state(step, self._components, self.loaded, directory, course)
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
        return "Finishing and saving" if self.is_done else f"Stopping before step {self.state.step + 1:,}"
