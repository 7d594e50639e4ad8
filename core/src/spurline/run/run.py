"""One run from config to result: builds the components, restores a checkpoint, trains, writes the record.

`Run(load_config("run.yaml")).train()` is what the command line does. Hooks get the run too: the class says what they
can do with it. SIGINT, SIGTERM and SIGHUP ask a run to stop after the step it is in, which is said at once; a second
SIGINT or SIGTERM raises KeyboardInterrupt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spurline.config.loading import LoadedConfig, as_loaded
from spurline.config.section import as_list
from spurline.data.configs import SerialPrefetchConfig
from spurline.errors import (
    PluginError,
    RankFailedError,
    RunFailedError,
    UserError,
    listing,
)
from spurline.plugins.run_view import Warned
from spurline.progress import Progress, silent
from spurline.protocols.backend import Backend
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.source import BatchSource
from spurline.protocols.stateful import Stateful
from spurline.protocols.tracker import RunInfo, ShowsWarnings, Tracker
from spurline.run import loop
from spurline.run.build import build_components, build_data, build_trackers, build_update, summarize_run
from spurline.run.checkpoints.best import BestSoFar
from spurline.run.checkpoints.changes import ResumeRequest
from spurline.run.checkpoints.checkpoint import Checkpoint
from spurline.run.checkpoints.hook_state import HookStates
from spurline.run.checkpoints.resume import Course, Resume, find_resume, rate_notes, restore, restore_best
from spurline.run.checkpoints.saving import Saving
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline.run.endings.ending import Ending, RunResult, Status, go_on
from spurline.run.endings.stop_request import StopRequest
from spurline.run.evaluations.early_stop import EarlyStop
from spurline.run.evaluations.step_scores import StepScores
from spurline.run.event_loop import own_event_loops
from spurline.run.on_step import OnStep, OnStepHook
from spurline.run.record_files import read_mapping
from spurline.run.state import RunState
from spurline.trackers.frame import metrics_frame

if TYPE_CHECKING:
    import pandas
    from transformers import PreTrainedTokenizerBase


class Run:
    """One training run, and what a program or a hook can do with it. Hooks get it in `on_run_start`.

    loaded: what `load_config` returned, or what it takes: the path of a config file or a mapping.
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
        loaded: LoadedConfig | Path | str | Mapping[str, Any],
        resume: str | Path = "auto",
        allow_change: Sequence[str] = (),
        progress: Progress = silent,
        on_step: OnStep | Sequence[OnStep] = (),
    ) -> None:
        self.loaded = loaded = as_loaded(loaded)
        self.config = loaded.config
        self.hooks = loaded.host.hooks
        self.directory = RunDirectory(loaded.config.run_dir)
        self.state = RunState()
        self._request = ResumeRequest(str(resume), tuple(as_list(allow_change)))
        self._progress = progress
        self._on_step = OnStepHook(on_step)
        self._resumed = Resume(None)
        self._notes: list[str] = []
        self._best = BestSoFar(loaded.config.checkpoint.keep_best)
        self._early_stop = EarlyStop(loaded.config.stop_when)
        self._step_under_way: int | None = None
        self._stop = StopRequest(self._words_on_stop)
        self._hook_states = HookStates()
        self._is_started = self._is_over = False

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "backend", "batches", "tokenizer"):
            raise AttributeError(f"Run.{name} exists while the run trains. Read it in a hook, such as on_step_start.")
        raise AttributeError(f"'Run' object has no attribute '{name}'")

    def train(self) -> RunResult:
        """Train to the end or to a stop signal. Raises SpurlineError; what was saved before an error is intact.

        Signals are caught from the beginning of training until all that was started has ended; before that there is
        nothing to save, and they act as usual.
        """
        # Engines and ranks take seconds to end, in which an interruption would lose the result of a run that is saved.
        with ExitStack() as signals, ExitStack() as stack:
            stack.enter_context(own_event_loops())
            self.directory.open()
            stack.callback(self.directory.close)
            try:
                if not self._build(stack):
                    return self._already_finished()
            except KeyboardInterrupt:
                text = f"Interrupted before training began; nothing in {self.directory.path} is lost."
                raise KeyboardInterrupt(f"{text} {go_on(self.loaded, self._request.options())}") from None
            signals.enter_context(self._stop)
            error: BaseException | None = None
            try:
                self.hooks.on_run_start(run=self)
                self._notes += self._hook_states.close()
                self._start_trackers(stack, self._components.trackers, [*self._notes, *self._files.data_notes()])
                # Engines may take minutes to start, and nothing is trained by then.
                self._stop.cut_short(lambda: self._start_batches(stack))
                if self._stop.signal is None:
                    self._settle_start()
                loop.train(self)
                self._saving.take_written(wait=True)
                if self.state.step > self.state.saved_step:
                    # A stop was asked for after the last step had its chance to save.
                    self._saving.save(self.state.step)
                self._export_if_finished()
                self.directory.check_present()
            except BaseException as raised:
                # What ended the run stands, also where saving the rest of it fails in a way of its own.
                error = raised
                error = self._ending.explained(raised)
                if error is raised:
                    raise
                raise error from raised
            finally:
                self._is_over = True
                self._end(error)
            return self._result(self._ending.go_on(), self._ending.lasting_warnings())

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
        return self._scores.ask(prefix)

    def export(self, path: Path | str, *, replace: bool = False) -> Path:
        """Write the weights that the backend has at this moment as a Hugging Face folder, adapters merged.

        path: a new or empty folder, which is returned. replace: remove what is there. Raises UserError when something
        is there that may not be replaced.
        """
        return self._export(path, replace=replace)

    def export_adapter(self, path: Path | str, *, replace: bool = False) -> Path:
        """Write the adapter that the backend has at this moment as a folder that `PeftModel.from_pretrained` loads.

        path, replace: as for `export`. Also raises UserError for a run without `backend.lora`.
        """
        return self._export(path, replace=replace, adapter=True)

    def _export(self, path: Path | str, *, replace: bool, adapter: bool = False) -> Path:
        export = self.config.backend.export
        return export(self.backend, self.loaded, self.tokenizer, Path(path), replace=replace, adapter=adapter)

    def metrics_frame(self) -> pandas.DataFrame:
        """Return the record so far as a pandas DataFrame: a row for each step, indexed by `step`, a column for
        each metric. Also after the run, and of what an earlier process has done of it. Raises UserError without
        pandas."""
        return metrics_frame(self.directory.path)

    def request_stop(self, reason: str) -> None:
        """End the run in good order after the step it is in: with a checkpoint, a report and status `stopped`.

        reason: for people; on the terminal, in summary.json and in the result. The first one given stands. The same
        command trains on from there.
        """
        self._stop.reason = self._stop.reason or reason or "no reason was given"

    def warn(self, step: int, kind: str, words: str) -> None:
        """Show people what is off at the step that was just recorded, on the terminal.

        Args:
            step: Number of the step.
            kind: A short name of the trouble; one kind is shown once in a while.
            words: A sentence or two: what is off, and what to do.
        """
        self._check_training("warn")
        for tracker in self._components.trackers.values():
            if isinstance(tracker, ShowsWarnings):
                tracker.warn(step, kind, words)

    def add_judge(self, judge: Callable[[], Sequence[Warned]]) -> None:
        """Let a function say what was off in the run as a whole, for summary.json and the result.

        Args:
            judge: Called once when the run ends, however it ends, with all its steps recorded.
        """
        self._check_training("add_judge")
        self._ending.judges.append(judge)

    def _check_training(self, method: str) -> None:
        if not hasattr(self, "_ending"):
            raise RunFailedError(f"run.{method} came before the run was built. Call it in on_run_start or later.")

    def _build(self, stack: ExitStack) -> bool:
        """Build the run up to its first step; False where its end has been reached, before weights and ranks load."""
        resume = self._resumed = find_resume(self.directory, self.loaded, self._request)
        trackers = build_trackers(self.loaded)
        # Before the data, which may take hours to tokenize.
        self.config.backend.check_trainable(self.config)
        data = build_data(self.loaded, stack, progress=self._progress)
        self.source = data.source
        if resume.checkpoint is not None and self._has_ended(resume.checkpoint):
            best = restore_best(resume.checkpoint, self.config, data.evaluations, self._best)
            self.state = RunState(resume.checkpoint.step, resume.checkpoint.step, resume.checkpoint.path)
            self._start_trackers(stack, trackers, [*resume.notes, *best])
            return False
        built = build_components(self.loaded, data, trackers, stack, self._progress, resume.done)
        components = self._components = replace(built, hook_states=self._hook_states)
        self.directory.check_present()
        self.backend = components.backend
        self.tokenizer = components.data.context.tokenizer
        self._notes = [*components.notes, *resume.notes, *rate_notes(resume, self.loaded, data)]
        if resume.checkpoint is not None:
            self._progress("restoring the checkpoint")
            self._notes += restore(resume.checkpoint, components, self.loaded, self._best, self._early_stop)
            self.state = RunState(resume.checkpoint.step, resume.checkpoint.step, resume.checkpoint.path)
        elif note := self.directory.set_aside_earlier(self.source.records):
            self._notes.append(note)
        self._update = build_update(components, self.loaded, resume.done)
        # With what hooks of plugins attach for this run.
        stack.enter_context(self.loaded.host.attachments())
        self.loaded.host.attach(self._update, "core/update")
        self.loaded.host.attach(self._on_step, "on_step")
        history = {"history": list(resume.history)} if resume.history else {}
        self._files = RunRecordFiles(self.directory, summarize_run(components, self.loaded) | history)
        # A new run keeps no answers, not even those of step 0 that an earlier attempt left.
        self._files.start(self.loaded.resolved(), -1 if resume.checkpoint is None else self.state.step)
        self._scores = StepScores(components.data.evaluations, self.backend, self._best, self._early_stop)
        self._saving = Saving(self.loaded, self.directory, components, self.state, self._course)
        # Whatever ended the run: nothing is renamed into a directory that another run may hold.
        stack.callback(self._saving.abandon)
        self._ending = Ending(
            self.loaded,
            self.directory,
            self.source,
            self.state,
            self._saving,
            self._files,
            self._request.options(),
        )
        return True

    def _has_ended(self, checkpoint: Checkpoint) -> bool:
        """Return whether an earlier process made the last step, and left all that this one would."""
        wanted, folders = self.config.checkpoint, self.directory
        exported = {folders.exported_model: wanted.export_hf, folders.exported_adapter: wanted.export_adapter}
        return (
            checkpoint.step == self.source.total_steps
            and self._request.choice == "auto"
            and self._resumed.pending is None
            and read_mapping(folders.summary).get("status") == "finished"
            and all(path.exists() for path, is_wanted in exported.items() if is_wanted)
        )

    def _already_finished(self) -> RunResult:
        """Return the result of a run that has no step left. Plugins are not told, as nothing begins."""
        self._on_step.on_run_end()
        found: list[Mapping[str, Any]] = read_mapping(self.directory.summary).get("warnings", [])
        lasting = tuple(warning["words"] for warning in found if warning["lasts"])
        return self._result(go_on(self.loaded, ()), lasting)

    def _result(self, continuing: str, warnings: tuple[str, ...]) -> RunResult:
        files: dict[str, Path] = {}
        for made in self.hooks.on_run_recorded(run=self):
            if not isinstance(made, Mapping) or files.keys() & made.keys():
                raise PluginError(
                    f"A hook on_run_recorded returned {made!r}. It returns a mapping of names to the files that it "
                    f"made, under names of its own; taken: {listing(files)}."
                )
            files |= made
        return RunResult(
            self._status(),
            self.state.step,
            self.state.metrics,
            self.state.checkpoint,
            self._stop.signal,
            self._stop_reason(),
            continuing,
            self._best.facts(),
            warnings,
            *self._exported(),
            files,
        )

    def _course(self, pending: Mapping[str, float] | None) -> Course:
        return Course(self._update.done, self._resumed.history, self._best, self._early_stop, pending)

    def _start_trackers(self, stack: ExitStack, trackers: Mapping[str, Tracker], notes: Sequence[str]) -> None:
        # A step whose evaluation is still to come gets its line when that is done.
        kept = self.state.step - (1 if self._resumed.pending is not None else 0)
        continues = self._resumed.checkpoint is not None
        info = RunInfo(
            self.directory.path, kept, self.source.total_steps, self.loaded.resolved(), tuple(notes), continues
        )
        for tracker in trackers.values():
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
            self._scores.open()
            metrics |= self.maybe_evaluate(step, metrics)
            self.record(step, metrics)
            self.hooks.on_step_end(step=step, metrics=MappingProxyType(metrics))
            self._saving.save(step)
        elif self._resumed.foreign:
            # A kill before the first own checkpoint must not leave this run without the weights it began with.
            self._saving.save(self.state.step)

    def _evaluate_before_training(self) -> None:
        """What evaluations with `at_start` measure, recorded as step 0. No checkpoint covers it: a run that is killed
        before its first one starts again with an empty record, and measures again."""
        due = [evaluation for evaluation in self._components.data.evaluations if evaluation.at_start]
        if due and not self._stop:
            self._progress("evaluating the model before its first step")
            self._scores.open()
            metrics = {"epoch": 0.0}
            self.record(0, metrics | self._evaluated(0, *self._scores.measure(0, due), metrics))

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to train, 1-based, until the last one, a stop signal, or the end that `stop_when` asks for."""
        while not self.is_done and not self._stop:
            self.directory.check_present()
            self._scores.open()
            self._step_under_way = self.state.step + 1
            yield self._step_under_way
            self._step_under_way = None

    def maybe_evaluate(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of all evaluations that this step is due for, and those of `evaluate`.

        metrics: of the update just done. When the evaluation fails, they are saved with the weights before the error
        goes on: a mistake in a reward must not cost the training before it. A resume evaluates first.
        """
        evaluations = self._components.data.evaluations
        due = [evaluation for evaluation in evaluations if self._is_due(step, evaluation.every_steps)]
        if not due:
            return self._scores.beside(metrics)
        try:
            scores, samples = self._scores.measure(step, due)
        except RankFailedError:
            # Its weights have gone with the ranks.
            raise
        except Exception as error:
            self._saving.save_before(error, step, {**metrics, **self._scores.asked})
            raise
        return self._evaluated(step, scores, samples, metrics)

    def _evaluated(
        self, step: int, scores: dict[str, float], samples: Sequence[Mapping[str, Any]], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Keep the answers and tell the hooks; returns all metrics of evaluations, those that hooks made included.

        metrics: of the step besides.
        """
        self._files.add_samples(step, samples)
        self.hooks.on_eval_end(step=step, metrics=MappingProxyType(scores))
        return {**scores, **self._scores.beside(metrics)}

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Mark the step as done and send its metrics to every tracker."""
        self.loaded.host.calls.check_recorded(metrics)
        self._scores.close()
        self.directory.check_present()
        for tracker in self._components.trackers.values():
            tracker.log(step, dict(metrics))
        # Last: a step whose line cannot be written is not done.
        self.state.step = step
        self.state.metrics = dict(metrics)

    def maybe_checkpoint(self, step: int) -> None:
        """Save when steps or minutes say so, after the last step and the best one so far, and before a stop.

        With `checkpoint.async` what is saved between steps is written while training goes on.
        """
        self._saving.take_written(wait=False)
        is_due = self._is_due(step, self.config.checkpoint.every_steps)
        if self._stop or self.is_done or self._saving.is_time() or is_due or self._best.step == step:
            goes_on = not self._stop and not self.is_done
            self._saving.save(step, beside=self.config.checkpoint.is_async and goes_on)

    def saving_metrics(self) -> dict[str, float]:
        """Seconds that checkpoints beside training have taken from it since the last call."""
        return self._saving.metrics()

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self.source.total_steps or (every is not None and step % every == 0)

    @property
    def is_done(self) -> bool:
        """Return whether there is no further step to train: the last one was made, or `stop_when` ended the run."""
        return self.state.step >= self.source.total_steps or self._early_stop.reason is not None

    def _status(self) -> Status:
        # A signal during the start may leave the evaluation of the last step, which then has no metrics, to the next
        # process.
        is_owed = self._resumed.pending is not None and not self.state.metrics
        return "finished" if self.is_done and not is_owed else "stopped"

    def _stop_reason(self) -> str | None:
        if self.state.step >= self.source.total_steps:
            return None
        return self._early_stop.reason or self._stop.reason

    def _exported(self) -> tuple[Path | None, Path | None]:
        """Where the model and the adapter go when the run finishes, or None."""
        wanted, folders = self.config.checkpoint, self.directory
        if self._status() != "finished":
            return None, None
        return (
            folders.exported_model if wanted.export_hf else None,
            folders.exported_adapter if wanted.export_adapter else None,
        )

    def _export_if_finished(self) -> None:
        model, adapter = self._exported()
        if model is not None:
            self.export(model, replace=True)
        if adapter is not None:
            self.export_adapter(adapter, replace=True)

    def _end(self, error: BaseException | None) -> None:
        """Tell the hooks and write the status; a failure here never hides the error that ended the run."""
        try:
            self.hooks.on_run_end(run=self, error=error)
        except Exception as failure:
            if error is None:
                # It makes a failed run of one that no error ended.
                self._ending.record(failure, self._status(), None)
                raise
            error.add_note(f"on_run_end failed too: {type(failure).__name__}: {failure}")
        self._ending.record(error, self._status(), self._stop_reason())

    def _words_on_stop(self) -> str:
        if self._is_over:
            return "Ending what the run has started"
        step = self._step_under_way
        if step is not None:
            return f"Finishing step {step:,} and saving"
        return "Finishing and saving" if self.is_done else f"Stopping before step {self.state.step + 1:,}"
