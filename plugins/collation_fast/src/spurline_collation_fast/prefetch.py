"""Prefetch `async`: while a step trains, the batches of the next ones are built on another thread.

Place on the way: source (or evaluation) -> build(step) -> batches in order -> loop. Since the order of the data is a
pure function of the step, building ahead crosses epochs freely and the batches are those of `core/serial`. Keeps no
position: what was built ahead of a checkpoint is built again after a resume. `BuildAhead` knows nothing of training:
it decides when things are built and on which thread; all its methods belong to one thread, the owner.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from spurline.data.batch import TrainingBatch
from spurline.errors import RunFailedError
from spurline.protocols.prefetch import BuildBatch
from spurline_collation_fast.configs import AsyncPrefetchConfig

_OVERRUN_GRACE_S = 0.5

Built = TypeVar("Built")


class BuildAhead(Generic[Built]):
    """Up to `depth` results of `build(step)`, ready or in the making; served strictly in the order of submission.

    build: called on the background thread, one step at a time. discard: called on the owner's thread with each result
    that is dropped unserved. timeout_s: how long any wait for one build lasts; after it RunFailedError names the step.
    """

    def __init__(
        self, build: Callable[[int], Built], discard: Callable[[Built], None], depth: int, timeout_s: float
    ) -> None:
        assert depth >= 1, f"depth must be at least 1, got {depth}"
        self._build = build
        self._discard = discard
        self._depth = depth
        self._timeout_s = timeout_s
        # Only the owner touches these; the two threads meet in the queue and in the futures, and share no lock.
        self._in_flight: deque[tuple[int, Future[Built]]] = deque()
        self._thread: threading.Thread | None = None
        self._is_shut_down = False
        self._has_overrun = False
        self._work: SimpleQueue[tuple[int, Future[Built]] | None] = SimpleQueue()
        self._building: int | None = None

    @property
    def has_room(self) -> bool:
        """Return whether another step may be submitted."""
        return len(self._in_flight) < self._depth

    def submit(self, step: int) -> None:
        """Have this step built, after those submitted before it."""
        assert not self._is_shut_down, f"step {step} is submitted after shutdown"
        assert self.has_room, f"step {step} has no slot: all {self._depth} hold steps {self._steps()}"
        if self._thread is None:
            # A daemon, so that a build that hangs cannot keep the interpreter from exiting.
            self._thread = threading.Thread(target=self._run, name="spurline-build-ahead", daemon=True)
            self._thread.start()
        future: Future[Built] = Future()
        self._in_flight.append((step, future))
        self._work.put((step, future))

    def get(self, expected_step: int) -> Built:
        """The result of the oldest submitted step, which must be this one. An error of its build is raised here."""
        assert self._in_flight, f"step {expected_step} is asked for, but nothing is in flight"
        step, future = self._in_flight[0]
        assert step == expected_step, f"step {expected_step} is asked for, but the next is {step} of {self._steps()}"
        self._wait(step, future)
        self._in_flight.popleft()
        return future.result()

    def clear(self) -> None:
        """Drop all that is in flight: what has not begun never will, the rest is waited for and discarded.

        An error of a dropped build is dropped with it: nobody needed that step.
        """
        dropped = [*self._in_flight]
        self._in_flight.clear()
        # Newest first: else the thread could begin one while those before it are being cancelled.
        for _, future in reversed(dropped):
            future.cancel()
        # Each is discarded even when discarding another one fails.
        with ExitStack() as stack:
            for step, future in dropped:
                stack.callback(self._drop, step, future)

    def shutdown(self) -> None:
        """Clear and end the thread, which is joined even when clearing fails. May be called again."""
        self._is_shut_down = True
        try:
            self.clear()
        finally:
            self._join()

    def _drop(self, step: int, future: Future[Built]) -> None:
        if future.cancelled():
            return
        self._wait(step, future)
        if future.exception() is None:
            self._discard(future.result())

    def _wait(self, step: int, future: Future[Built]) -> None:
        if not wait([future], self._limit_s()).done:
            raise self._overrun(f"Step {step}: its batch was not ready after {self._timeout_s:g} s")

    def _join(self) -> None:
        if self._thread is None:
            return
        self._work.put(None)
        self._thread.join(self._limit_s())
        if self._thread.is_alive():
            raise self._overrun(f"The thread that builds batches ahead did not end within {self._timeout_s:g} s")
        self._thread = None

    def _limit_s(self) -> float:
        """Return how long to wait: only briefly after an overrun, or a failing run would take several limits to end."""
        return min(_OVERRUN_GRACE_S, self._timeout_s) if self._has_overrun else self._timeout_s

    def _overrun(self, what: str) -> RunFailedError:
        self._has_overrun = True
        return RunFailedError(
            f"{what}; {self._activity()}. If it is only slow, raise prefetch.timeout_s; if it hangs, look at what that "
            "line waits for (a network folder, say)."
        )

    def _activity(self) -> str:
        """Say what the thread is doing now, and in which line of code."""
        step, thread = self._building, self._thread
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        if step is None or frame is None:
            return "nothing is being built"
        return f"building step {step}, it is at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"

    def _steps(self) -> list[int]:
        return [step for step, _ in self._in_flight]

    def _run(self) -> None:
        # Waits without a limit, for the owner alone: shutdown wakes it, and as a daemon it ends with the process.
        while (work := self._work.get()) is not None:
            self._build_one(*work)
            # While waiting for more, nothing here may keep a served result alive.
            del work

    def _build_one(self, step: int, future: Future[Built]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._building = step
        try:
            built = self._build(step)
        except BaseException as error:  # noqa: BLE001 - not handled here: `get` raises it to its caller
            self._building = None
            future.set_exception(error)
        else:
            self._building = None
            future.set_result(built)


@dataclass(frozen=True)
class TimedBatch:
    """A batch and the seconds its building took."""

    batch: TrainingBatch
    collate_s: float


class AsyncPrefetch:
    """Holds at most `depth` batches, ready or in the making, besides the one being trained."""

    def __init__(self, config: AsyncPrefetchConfig, build: BuildBatch, last_step: int) -> None:
        def timed(step: int) -> TimedBatch:
            begin = time.perf_counter()
            return TimedBatch(build(step), time.perf_counter() - begin)

        self._ahead = BuildAhead(timed, _release, config.depth, config.timeout_s)
        self._last_step = last_step
        self._next_to_submit = last_step + 1
        self._metrics: dict[str, float] = {}
        # A run may be started while its caller handles an error, which is not the one that ends the run.
        self._handled_outside = sys.exc_info()[1]

    def start(self, step: int) -> None:
        """Begin at this step (1-based); what was built for other steps is released."""
        self._ahead.clear()
        self._next_to_submit = step
        self._fill()

    def next(self, step: int) -> TrainingBatch:
        """The batch of this step, the one after the last asked for; waits for it.

        Raises what building it raised, RunFailedError when it is not ready after `timeout_s`.
        """
        begin = time.perf_counter()
        built = self._ahead.get(step)
        wait_s = time.perf_counter() - begin
        self._fill()
        self._metrics = {
            "time/collate": built.collate_s,
            "time/collate_wait": wait_s,
            "collation/hidden": hidden_share(built.collate_s, wait_s),
        }
        return built.batch

    def _fill(self) -> None:
        while self._ahead.has_room and self._next_to_submit <= self._last_step:
            self._ahead.submit(self._next_to_submit)
            self._next_to_submit += 1

    def metrics(self) -> dict[str, float]:
        """`time/collate` and `time/collate_wait` in seconds; `collation/hidden`: share of the first not waited for."""
        return dict(self._metrics)

    def close(self) -> None:
        """Raises only when a build hangs or a buffer cannot be given back, and then never over an error of the loop."""
        ending = sys.exc_info()[1]
        try:
            self._ahead.shutdown()
        except Exception as failure:
            if ending is None or ending is self._handled_outside:
                raise
            ending.add_note(f"Closing the prefetch failed too: {failure}")


def hidden_share(collate_s: float, wait_s: float) -> float:
    """Share of the collation time, 0..1, that nobody waited for."""
    return max(0.0, 1 - wait_s / collate_s) if collate_s > 0 else 1.0


def _release(built: TimedBatch) -> None:
    built.batch.release()
