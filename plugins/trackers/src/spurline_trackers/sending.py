"""Send metrics to a store (a service or a database) on a separate thread, so that training is not delayed.

The run directory contains the id of the run in the store, so a resumed run continues the same run there. If a run is
killed and then repeats steps, these steps are sent again. Only metrics.jsonl has each step exactly once.
"""

from __future__ import annotations

import importlib
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from spurline.errors import ConfigError, Problem
from spurline.files import replace_file
from spurline.protocols.tracker import RunInfo
from spurline.terminal import tell

_CLOSE_WAIT_S = 30.0
_LONGEST_QUEUE = 10_000
"""Maximum number of steps that wait for a slow store. A step takes a few kilobytes."""


class SendingTracker(ABC):
    """A tracker that writes to a store on its own thread. Failures of the store are reported on stderr."""

    name: ClassVar[str]
    """The name of the tracker in the config."""
    fix: ClassVar[str]
    """Advice that the error message gives if the store cannot be opened."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, dict[str, float]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reached = 0
        self._total_steps = 0

    @abstractmethod
    def open_run(self, info: RunInfo) -> None:
        """Open the store. If `info.is_resumed` is true, continue the earlier run there, else begin a new run."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of one step. Called on the tracker's thread."""

    @abstractmethod
    def close_run(self, *, is_finished: bool) -> None:
        """End the run in the store. Called on the tracker's thread. A run that is not finished may be resumed."""

    def start(self, info: RunInfo) -> None:
        """Open the store. Raises ConfigError if it cannot be opened."""
        try:
            self.open_run(info)
        except ConfigError:
            raise
        except Exception as error:
            text = f"'{self.name}' cannot start a run: {_first_line(error)}. {self.fix}"
            raise ConfigError([Problem("trackers", text)]) from error
        self._total_steps, self._reached = info.total_steps, info.resume_step
        self._thread = threading.Thread(target=self._work, name=f"{self.name}-tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._thread is not None, f"{type(self).__name__}.log before start or after close"
        self._reached = step
        if self._queue.qsize() < _LONGEST_QUEUE:
            self._queue.put((step, {name: float(metrics[name]) for name in metrics if name != "step"}))
        else:
            self._say(f"{_LONGEST_QUEUE} steps wait to be sent, so step {step} is left out. It is in metrics.jsonl.")

    def flush(self) -> None:  # noqa: B027 - not abstract: there is nothing to do
        """Do nothing. A checkpoint relies only on metrics.jsonl, which the run itself flushes."""

    def close(self) -> None:
        """Send the waiting steps, for at most 30 seconds. Without `start`, or when called again, do nothing."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._queue.put(None)
        thread.join(_CLOSE_WAIT_S)
        if thread.is_alive():
            self._say(f"did not end within {_CLOSE_WAIT_S:g} s. The steps that were not sent are in metrics.jsonl.")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self.write(*item)
            except Exception as error:  # noqa: BLE001 - a failing store must not end a training run
                self._say(f"step {item[0]} could not be sent: {_first_line(error)}. It is in metrics.jsonl.")
        try:
            self.close_run(is_finished=self._reached >= self._total_steps)
        except Exception as error:  # noqa: BLE001 - the run is over
            self._say(f"could not close its run: {_first_line(error)}.")

    def _say(self, text: str) -> None:
        tell(f"{self.name}: {text}")


def kept_run_id(info: RunInfo, file: str, make: Callable[[], str]) -> str:
    """Return the id in this file of the run directory. If the run is new or has no id, make one and write it there."""
    path = info.run_dir / file
    if info.is_resumed and path.exists() and (earlier := path.read_text(encoding="utf-8").strip()):
        return earlier
    run_id = make()
    replace_file(path, f"{run_id}\n")
    return run_id


def new_run_id(run_dir: Path, begin: str | None = None) -> str:
    """Return a new unique id, which begins with `begin` if given, or else with the name of the run directory."""
    name = begin or re.sub(r"[^A-Za-z0-9_-]+", "-", run_dir.resolve().name).strip("-")[:40] or "run"
    return f"{name}-{secrets.token_hex(4)}"


def tracker_library(name: str, module: str | None = None) -> Any:
    """Import `module`, by default the module `name`, for tracker `name`. Raises ConfigError if this fails."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        text = (
            f"'{name}' needs the {name} library, which cannot be imported ({error}). Install it: "
            f"pip install 'spurline-trackers[{name}]'"
        )
        raise ConfigError([Problem("trackers", text)]) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return (text or type(error).__name__).rstrip(".")
