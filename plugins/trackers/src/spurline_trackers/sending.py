"""What trackers that send to a store of others have in common: each step reaches it once, and training never waits.

The store is asked for the last step that it holds of each metric. What it holds is not sent again, also where a resumed
run trains those steps a second time, and what it lacks of the steps before a resume comes from metrics.jsonl. So
nothing is lost with a kill, and nothing stands there twice. A thread of its own does all that talks to the store.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import ClassVar

from spurline.errors import ConfigError, Problem
from spurline.protocols.tracker import RunInfo
from spurline.terminal import printable
from spurline.trackers.jsonl import METRICS_FILE, read_metrics

LastStep = Callable[[str], int]
"""The last step that the store holds of the metric with this name; NO_STEP where it has none."""
NO_STEP = -1
"""Before step 0, which has the evaluation before training."""

_START_WAIT_S = 60.0
_CLOSE_WAIT_S = 30.0
_LONGEST_PAUSE_S = 30.0
_LONGEST_QUEUE = 10_000
"""Steps that wait for a store which does not answer, a few kilobytes each."""


class SendingTracker(ABC):
    """A tracker whose `open_run`, `write` and `close_run` talk to a store, all on one thread of its own.

    A store that is down when the run starts is a ConfigError. One that fails later is told of on stderr and tried again
    for as long as the run lasts; what it did not take by then, the next resume sends.
    """

    name: ClassVar[str]
    """As in the config."""
    fix: ClassVar[str]
    """A sentence: what to do about a store that does not open."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, dict[str, float]]] = deque()
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._is_full = False
        self._thread: threading.Thread | None = None
        self._last_step: LastStep = lambda name: NO_STEP
        self._reached = 0
        self._total_steps = 0

    @abstractmethod
    def open_run(self, info: RunInfo) -> LastStep:
        """Open the store and the run in it: the one it belongs to when `info.is_resumed`, else a new one."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store metrics of one step; steps come in order. Called again with the same step after it raised."""

    @abstractmethod
    def close_run(self, *, is_finished: bool) -> None:
        """Let go. is_finished: whether the run did all of its steps; else it may be resumed."""

    def start(self, info: RunInfo) -> None:
        """Open the store and send it what it lacks of earlier steps. Raises ConfigError when it does not open."""
        assert self._thread is None, f"{type(self).__name__} is already started"
        self._total_steps = info.total_steps
        self._reached = info.resume_step
        opened: Future[LastStep] = Future()
        self._is_closing.clear()
        self._thread = threading.Thread(
            target=self._work, args=(info, opened), name=f"{self.name}-tracker", daemon=True
        )
        self._thread.start()
        try:
            self._last_step = opened.result(_START_WAIT_S)
        except ConfigError:
            self._thread = None
            raise
        except Exception as error:
            self._thread = None
            if not opened.done():
                # A store that opens later has its run closed.
                self._is_closing.set()
                raise self._refused(f"no answer within {_START_WAIT_S:.0f} s.") from error
            raise self._refused(f"{_words(error)}.") from error
        earlier = read_metrics(info.run_dir / METRICS_FILE) if info.is_resumed else []
        for line in earlier:
            if line["step"] <= info.resume_step:
                self._enqueue(int(line["step"]), line)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Leave one step to the thread that sends."""
        assert self._thread is not None, f"{type(self).__name__}.log before start or after close"
        self._reached = step
        if len(self._queue) >= _LONGEST_QUEUE and not self._is_full:
            # A later step must not get there before these: the next resume would take them for sent.
            self._is_full = True
            self._say(f"{_LONGEST_QUEUE} steps wait to be sent, so later ones are not kept for it. {_WHERE_THEY_ARE}")
        if not self._is_full:
            self._enqueue(step, metrics)

    def flush(self) -> None:  # noqa: B027 - not abstract: there is nothing to do
        """Nothing to do: what a checkpoint covers is in metrics.jsonl, from which a resume sends what is missing."""

    def close(self) -> None:
        """Send what is left, for a limited time. May be called twice, or without start."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._is_closing.set()
        with self._changed:
            self._changed.notify()
        thread.join(_CLOSE_WAIT_S)
        if left := len(self._queue):
            self._say(f"{left} steps were not sent. {_WHERE_THEY_ARE}")
        elif thread.is_alive():
            self._say(f"did not close within {_CLOSE_WAIT_S:.0f} s and is left alone.")

    def _enqueue(self, step: int, metrics: Mapping[str, float]) -> None:
        missing = {name: value for name, value in metrics.items() if name != "step" and step > self._last_step(name)}
        if missing:
            with self._changed:
                self._queue.append((step, missing))
                self._changed.notify()

    def _work(self, info: RunInfo, opened: Future[LastStep]) -> None:
        try:
            opened.set_result(self.open_run(info))
        except BaseException as error:  # noqa: BLE001 - start raises it
            opened.set_exception(error)
            return
        while (item := self._next()) is not None:
            if not self._send(*item):
                return
            self._queue.popleft()
        try:
            self.close_run(is_finished=self._reached >= self._total_steps)
        except Exception as error:  # noqa: BLE001 - the metrics are there, and the run has come to its end
            self._say(f"could not close its run: {_words(error)}.")

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """The step to send, which stays in the queue until it is sent; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing.is_set())
            return self._queue[0] if self._queue else None

    def _send(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Write one step, as often as it takes. Returns whether that came about before the end."""
        give_up_at = math.inf
        pause_s = 0.5
        has_failed = False
        while True:
            try:
                self.write(step, metrics)
            except Exception as error:  # noqa: BLE001 - a store of others must not end a training run
                if not has_failed:
                    has_failed = True
                    self._say(f"step {step} could not be sent: {_words(error)}. Training goes on; it is tried again.")
            else:
                if has_failed:
                    self._say(f"answers again; sent step {step}.")
                return True
            self._is_closing.wait(pause_s)
            if self._is_closing.is_set():
                if math.isinf(give_up_at):
                    give_up_at = time.monotonic() + _CLOSE_WAIT_S / 2
                if time.monotonic() >= give_up_at:
                    return False
                time.sleep(min(pause_s, 2.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _refused(self, why: str) -> ConfigError:
        return ConfigError([Problem("trackers", f"'{self.name}' cannot start a run: {why} {self.fix}")])

    def _say(self, text: str) -> None:
        print(printable(f"{self.name}: {text}"), file=sys.stderr, flush=True)


_WHERE_THEY_ARE = f"They are in {METRICS_FILE}, from which a resume of the run sends them."


def _words(error: BaseException) -> str:
    """The first line of what an error says."""
    text = str(error).strip().split("\n")[0]
    return (text or type(error).__name__).rstrip(".")
