"""Train one run from config to result, and let programs and hooks control it.

The command line calls `Run(load_config("run.yaml")).train()`. SIGINT, SIGTERM and SIGHUP ask a run to stop after its
current step. A second SIGINT or SIGTERM raises KeyboardInterrupt. The module `session` trains the steps.
"""

from __future__ import annotations

import re
from asyncio import events
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spurline.config.loading import LoadedConfig, as_loaded
from spurline.config.section import as_list
from spurline.errors import PluginError, RunFailedError, UserError, listing
from spurline.plugins.hookspecs import hookimpl
from spurline.plugins.run_view import RunState, Warned
from spurline.progress import Progress, silent
from spurline.protocols.backend import Backend
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.source import BatchSource
from spurline.protocols.stateful import Stateful
from spurline.protocols.tracker import ShowsWarnings
from spurline.run.build import build_components, prepare
from spurline.run.checkpoints.hook_state import HookStates
from spurline.run.checkpoints.resume import ResumeRequest, find_resume
from spurline.run.directory import RunDirectory
from spurline.run.endings.ending import RunResult, go_on
from spurline.run.endings.stop_request import StopRequest
from spurline.run.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


OnStep = Callable[[int, Mapping[str, float]], object]
"""A function that is called with a step's number, counted from 1, and the step's read-only metrics."""


class Run:
    """One training run, with methods for programs and hooks. Hooks get it in `on_run_start`.

    Call all methods except `keep_state` on the thread that runs the training loop. Hooks are called on this thread too.

    Args:
        loaded: A loaded config, the path of a config file, or a mapping.
        resume: `auto` continues from the latest checkpoint of run_dir if there is one. `never` refuses a run_dir that
            has a checkpoint. `latest`, `best` or the path of a folder chooses a checkpoint.
        allow_change: Settings that may differ from the checkpoint although they affect training, such as
            `optimizer.learning_rate`. The history of the run lists each of these changes.
        progress: Called with a short text when a slow part of the start begins. By default nothing is reported.
        on_step: One or more functions that are called after each step with its number and metrics. They may call
            `request_stop`. An exception ends the run. If a function has a method `close`, the run calls it at the end.

    Attributes:
        config: Every setting, frozen. A plugin's section is `getattr(run.config, "NAME")`.
        loaded: The config with its plugin host; `loaded.host.attach` adds hooks to this run.
        hooks: Calls all implementations of a hook, as in `run.hooks.on_step_start(step=1)`.
        directory: The paths of the files that the run writes; `directory.path` is run_dir.
        state: The last finished step with its metrics, and the newest checkpoint.
        backend: The backend, which holds the model. `backend`, `source` and `tokenizer` exist from `on_run_start` to
            `on_run_end`. `spurline.protocols.backend` lists further abilities of some backends.
        source: The source of batches; `source.total_steps` is the length of the run.
        tokenizer: The tokenizer of the model, from Hugging Face transformers.
        batches: The prefetch, which serves the batches. It exists from the first step on.
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
        self._stop = StopRequest(lambda: "Ending" if self._session is None else self._session.words_on_stop())
        self._hook_states = HookStates()
        self._session: Session | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "backend", "batches", "tokenizer"):
            session = self.__dict__.get("_session")
            if hasattr(session, name):
                return getattr(session, name)
            raise AttributeError(f"Run.{name} exists only while the run trains. Use it in a hook like on_step_start.")
        raise AttributeError(f"'Run' object has no attribute '{name}'")

    @property
    def is_done(self) -> bool:
        """Return whether there is no further step to train."""
        return self._session is not None and self._session.is_done

    def train(self) -> RunResult:
        """Train to the end or to a stop signal. Raises SpurlineError. An error leaves earlier checkpoints intact.

        Signals are caught from the beginning of training until all engines and ranks have ended. Before training there
        is nothing to save, and signals act as usual.
        """
        with ExitStack() as signals, ExitStack() as stack:
            stack.enter_context(own_event_loops())
            self.directory.open()
            stack.callback(self.directory.close)
            try:
                session = self._session = self._begin(stack)
            except KeyboardInterrupt:
                text = f"Interrupted before training began; nothing in {self.directory.path} is lost."
                raise KeyboardInterrupt(f"{text} {go_on(self.loaded, self._request.options())}") from None
            signals.enter_context(self._stop)
            session.train(self)
            files: dict[str, Path] = {}
            for made in self.hooks.on_run_recorded(run=self):
                if not isinstance(made, Mapping) or files.keys() & made.keys():
                    raise PluginError(
                        f"A hook on_run_recorded returned {made!r}. It must return a mapping of names to files, with "
                        f"names that no other hook uses. Taken: {listing(files)}."
                    )
                files |= made
            return session.result(files)

    def _begin(self, stack: ExitStack) -> Session:
        """Prepare everything for the first step: the data, then the weights. The stack closes what is built."""
        resume = find_resume(self.directory, self.loaded, self._request)
        self.loaded, self.config = resume.loaded, resume.loaded.config
        prepared = prepare(self.loaded, stack, progress=self._progress, done=resume.done)
        built = build_components(self.loaded, prepared, stack, self._progress, resume.done)
        components = replace(built, hook_states=self._hook_states)
        session = Session(
            self.loaded, self.directory, self._request, resume, components, self._stop, self._progress, stack
        )
        self.loaded.host.attach(self._on_step, "on_step")
        self.state = session.state
        return session

    def keep_state(self, name: str, state: Stateful) -> None:
        """Save the state of a plugin in every checkpoint, under `hooks/PLUGIN/NAME`, and restore it on a resume.

        Call it in `on_run_start`, in new and resumed runs alike. In a resumed run, this calls `state.load_state_dict`
        with the state from the checkpoint. A program may also call it before `train`.

        Args:
            name: A name that is unique within the plugin.
            state: Its `state_dict` returns nested dicts and lists of JSON values and numpy arrays. For a step with a
                checkpoint, `state_dict` is called after `on_step_end`.

        Raises:
            PluginError: The name is taken, the object is not a `Stateful`, or training has begun.
        """
        self._hook_states.keep(self.loaded.host.calls.plugin, name, state)

    def evaluate(self, prefix: str) -> dict[str, float]:
        """Run every evaluation of the run now, with the backend's current weights.

        If it is called between `on_step_start` and the end of `on_eval_end`, the step's record includes the metrics.
        No hook is called, and no sample answers are kept.

        Returns:
            The metrics with `PREFIX/` in place of `eval/`, such as `ema/loss`.

        Raises:
            UserError: There is no held-out data, or the prefix is taken.
            RunFailedError: The source has not started yet, or the backend's weights are swapped and the evaluation uses
                engines that have their own copy of the weights.
        """
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", prefix) or prefix == "eval":
            raise UserError(
                f"run.evaluate({prefix!r}): a prefix has only letters, digits, dots, dashes and underscores. It must "
                "not be 'eval'."
            )
        if self._session is not None and self._session.is_done and not self._session.is_started:
            # The run had finished before, so nothing was started.
            self._session.start_batches()
        if self._session is None or not self._session.is_started:
            raise RunFailedError(
                f"run.evaluate({prefix!r}) was called before the run started its source. Call it in on_step_start or "
                "later."
            )
        return self._session.scores.ask(prefix)

    def export(self, path: Path | str, *, replace: bool = False) -> Path:
        """Write the backend's current weights as a Hugging Face folder. Adapters are merged into the weights.

        Args:
            path: The folder to write, which is returned.
            replace: Whether to replace content of the folder. If not, the folder must be new or empty.

        Raises:
            UserError: If the folder has content that may not be replaced.
        """
        return self._export(path, replace=replace)

    def export_adapter(self, path: Path | str, *, replace: bool = False) -> Path:
        """Write the backend's current adapter as a folder that `PeftModel.from_pretrained` loads.

        The arguments are the same as in `export`. Also raises UserError if the config has no `backend.lora`.
        """
        return self._export(path, replace=replace, adapter=True)

    def _export(self, path: Path | str, *, replace: bool, adapter: bool = False) -> Path:
        export = self.config.backend.export
        return export(self.backend, self.loaded, self.tokenizer, Path(path), replace=replace, adapter=adapter)

    def request_stop(self, reason: str) -> None:
        """End the run after its current step, with a checkpoint, a report and status `stopped`. It can be resumed.

        Args:
            reason: Words for the terminal, summary.json and the result. Only the first call's reason counts.
        """
        self._stop.reason = self._stop.reason or reason or "no reason was given"

    def warn(self, step: int, kind: str, words: str) -> None:
        """Show on the terminal a warning about the step that was just recorded.

        Args:
            step: Number of the step.
            kind: A short name of the problem. A tracker may show only some of the warnings of one kind.
            words: A sentence or two about the problem and what to do.
        """
        for tracker in self._training("warn").components.trackers.values():
            if isinstance(tracker, ShowsWarnings):
                tracker.warn(step, kind, words)

    def add_judge(self, judge: Callable[[], Sequence[Warned]]) -> None:
        """Register a function that reports problems of the whole run, for summary.json and the result.

        Args:
            judge: Called once at the end of the run, after all steps are recorded. It is also called after an error.
        """
        self._training("add_judge").judges.append(judge)

    def _training(self, method: str) -> Session:
        if self._session is None:
            raise RunFailedError(f"run.{method} was called before the run was built. Call it in on_run_start or later.")
        return self._session


class OnStepHook:
    """Calls functions in order after each step, and their methods `close` when the run ends."""

    def __init__(self, functions: OnStep | Sequence[OnStep]) -> None:
        self._functions = list(functions) if isinstance(functions, Sequence) else [functions]
        for function in self._functions:
            if not callable(function):
                raise UserError(f"Run(on_step=...): {function!r} is not a function that takes a step and metrics.")

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        for function in self._functions:
            function(step, metrics)

    @hookimpl
    def on_run_end(self) -> None:
        with ExitStack() as stack:
            # Call every `close`, even if one of them fails.
            for function in reversed(self._functions):
                close = getattr(function, "close", None)
                if callable(close):
                    stack.callback(close)


@contextmanager
def own_event_loops() -> Iterator[None]:
    """Let this thread run event loops although one is already running, as in a notebook.

    By default, asyncio refuses this. The notebook's loop waits until the cell ends, so another loop can run meanwhile.
    """
    outer = events._get_running_loop()
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(outer)
