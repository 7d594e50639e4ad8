"""Weights & Biases. A resumed run continues the same W&B run, whose id is kept in RUN_DIR/wandb_run_id.

The library is imported when the tracker is built, not when this module is.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spurline.errors import ConfigError, Problem
from spurline.protocols.tracker import RunInfo
from spurline.terminal import printable
from spurline_trackers.configs import WandbTrackerConfig
from spurline_trackers.library import tracker_library
from spurline_trackers.run_id import stored_run_id

ID_FILE = "wandb_run_id"
"""Name of the file inside the run directory that holds the W&B run id."""

# By default W&B waits for its service without a limit, at the end of a run and again at the end of the process.
_ENVIRONMENT = {"WANDB_FINISH_TIMEOUT": "30", "WANDB_FINISH_TIMEOUT_RAISES": "true"}
_SLACK_S = 10.0
"""Seconds after W&B's own limit at which a run ends all the same."""


class WandbTracker:
    """Send metrics to a W&B project.

    W&B cannot take back steps: after a resume it keeps what the earlier attempt logged for steps that are repeated,
    and goes on from there.
    """

    def __init__(self, config: WandbTrackerConfig) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._wandb = tracker_library("wandb")
        self._config = config
        self._run: Any = None
        self._folder = Path()
        self._exit_hooks: list[Callable[..., Any]] = []

    def start(self, info: RunInfo) -> None:
        """Open the W&B run. Raises ConfigError when W&B refuses, for example without an API key."""
        assert self._run is None, "WandbTracker is already started"
        self._folder = info.run_dir / "wandb"
        run_id = stored_run_id(info.run_dir, ID_FILE, is_resumed=info.is_resumed)
        try:
            with _kept_exit_hooks(self._exit_hooks):
                self._run = self._wandb.init(
                    project=self._config.project,
                    entity=self._config.entity,
                    name=self._config.display_name(info.run_dir),
                    id=run_id,
                    resume="allow",
                    mode=self._config.mode,
                    dir=str(info.run_dir),
                    config=dict(info.config),
                )
        except self._wandb.Error as error:
            refused = (
                f"'wandb' cannot start a run: {error} Log in with `wandb login`, set WANDB_API_KEY, or set mode: "
                "offline."
            )
            raise ConfigError([Problem("trackers", refused)]) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send all metrics of one step under their own names."""
        assert self._run is not None, "WandbTracker.log before start or after close"
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def flush(self) -> None:
        """Nothing to do: W&B's own process sends, or in offline mode writes, what it was given."""

    def close(self) -> None:
        """Finish the upload, for a limited time. May be called twice.

        The run is over, so what goes wrong is told on stderr.
        """
        if self._run is None:
            return
        run, self._run = self._run, None
        finished: Future[None] = Future()
        threading.Thread(target=_finish, args=(run, finished), name="wandb-tracker", daemon=True).start()
        limit_s = float(os.environ["WANDB_FINISH_TIMEOUT"])
        try:
            finished.result(limit_s + _SLACK_S)
        except TimeoutError:
            if not finished.done():
                # The end of the process would wait for the same.
                for hook in self._exit_hooks:
                    atexit.unregister(hook)
            _say(
                f"W&B did not take the rest of the run within {limit_s:g} s (WANDB_FINISH_TIMEOUT). It is in "
                f"{self._folder}: `wandb sync` sends it."
            )
        except Exception as error:  # noqa: BLE001 - a service of others must not end a run that is over
            _say(f"could not finish its run ({type(error).__name__}: {error}). What it lacks is in {self._folder}.")


@contextmanager
def _kept_exit_hooks(hooks: list[Callable[..., Any]]) -> Iterator[None]:
    """Adds to `hooks` what is registered for the end of the process meanwhile."""
    register = atexit.register

    def keep(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        hooks.append(hook)
        return register(hook, *args, **kwargs)

    atexit.register = keep
    try:
        yield
    finally:
        atexit.register = register


def _finish(run: Any, finished: Future[None]) -> None:
    try:
        finished.set_result(run.finish())
    except BaseException as error:  # noqa: BLE001 - close tells of it
        finished.set_exception(error)


def _say(text: str) -> None:
    print(printable(f"wandb: {text}"), file=sys.stderr, flush=True)
