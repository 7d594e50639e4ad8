"""Prefetch `async`: build the batches of the next steps on another thread while a step trains.

Data flow: source (or evaluation) -> build(step) -> batches in order -> loop. The order of the data is a pure
function of the step, so `core/serial` makes equal batches. A resumed run repeats the builds that were ahead.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from contextlib import ExitStack
from queue import SimpleQueue

from spurline.data.batch import TrainingBatch
from spurline.errors import RunFailedError
from spurline.protocols.prefetch import BuildBatch
from spurline_collation_fast.configs import AsyncPrefetchConfig

_OVERRUN_GRACE_S = 0.5

Timed = tuple[TrainingBatch, float]
"""A batch and the seconds that building it took."""


class AsyncPrefetch:
    """Builds at most `depth` batches ahead of the current training step.

    Only the thread of the training loop calls its methods. Another thread builds the steps one at a time, in order. The
    two threads share only a queue and futures.
    """

    def __init__(self, config: AsyncPrefetchConfig, build: BuildBatch, last_step: int) -> None:
        self._build, self._last_step = build, last_step
        self._depth, self._timeout_s = config.depth, config.timeout_s
        self._next_to_submit = last_step + 1
        self._in_flight: deque[tuple[int, Future[Timed]]] = deque()
        self._work: SimpleQueue[tuple[int, Future[Timed]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._building: int | None = None
        self._metrics: dict[str, float] = {}
        # A caller may start a run while it handles an error. `close` must not take that error for the run's error.
        self._handled_outside = sys.exc_info()[1]

    def start(self, step: int) -> None:
        """Begin at this step (1-based), and release the batches that were built before."""
        self._clear()
        self._next_to_submit = step
        self._fill()

    def next(self, step: int) -> TrainingBatch:
        """Wait for the batch of this step. Steps must be asked for in order.

        Raises the error of a failed build, or RunFailedError if the batch is not ready after `timeout_s`.
        """
        begin = time.perf_counter()
        assert self._in_flight, f"step {step} is asked for, but nothing is in flight"
        oldest, future = self._in_flight[0]
        assert step == oldest, f"step {step} is asked for, but the next is {oldest}"
        self._wait(step, future)
        self._in_flight.popleft()
        batch, collate_s = future.result()
        wait_s = time.perf_counter() - begin
        self._fill()
        self._metrics = {
            "time/collate": collate_s,
            "time/collate_wait": wait_s,
            "collation/hidden": max(0.0, 1 - wait_s / collate_s) if collate_s > 0 else 1.0,
        }
        return batch

    def metrics(self) -> dict[str, float]:
        """Return the building and waiting time of the last batch, and the share of building hidden behind training."""
        return dict(self._metrics)

    def close(self) -> None:
        """Release the batches that were built ahead, and end the thread. A second call has no effect.

        If a build hangs or a buffer cannot be released, this raises an error. If another error is ending the run, this
        adds a note to that error instead.
        """
        ending = sys.exc_info()[1]
        try:
            try:
                self._clear()
            finally:
                self._join()
        except Exception as failure:
            if ending is None or ending is self._handled_outside:
                raise
            ending.add_note(f"Closing the prefetch failed too: {failure}")

    def _fill(self) -> None:
        while len(self._in_flight) < self._depth and self._next_to_submit <= self._last_step:
            if self._thread is None:
                # A daemon thread cannot keep the interpreter from exiting if a build hangs.
                self._thread = threading.Thread(target=self._run, name="spurline-build-ahead", daemon=True)
                self._thread.start()
            work = self._next_to_submit, Future[Timed]()
            self._in_flight.append(work)
            self._work.put(work)
            self._next_to_submit += 1

    def _clear(self) -> None:
        """Cancel the builds that have not begun, wait for the others, and release their batches.

        Errors of these builds are ignored, since nobody needs their steps.
        """
        dropped = [*self._in_flight]
        self._in_flight.clear()
        # Cancel the newest build first. Otherwise the thread could begin a build that is about to be cancelled.
        for _, future in reversed(dropped):
            future.cancel()
        # Every batch is released, even if releasing another one fails.
        with ExitStack() as stack:
            for step, future in dropped:
                stack.callback(self._drop, step, future)

    def _drop(self, step: int, future: Future[Timed]) -> None:
        if future.cancelled():
            return
        self._wait(step, future)
        if future.exception() is None:
            future.result()[0].release()

    def _join(self) -> None:
        if self._thread is None:
            return
        self._work.put(None)
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise self._overrun(f"The thread that builds batches ahead did not end within {self._timeout_s:g} s")
        self._thread = None

    def _wait(self, step: int, future: Future[Timed]) -> None:
        if not wait([future], self._timeout_s).done:
            raise self._overrun(f"Step {step}: its batch was not ready after {self._timeout_s:g} s")

    def _overrun(self, what: str) -> RunFailedError:
        # Later waits are short, so that a failing run ends soon.
        self._timeout_s = min(_OVERRUN_GRACE_S, self._timeout_s)
        step, thread = self._building, self._thread
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        doing = "nothing is being built"
        if step is not None and frame is not None:
            doing = f"building step {step}, which is at {frame.f_code.co_filename}:{frame.f_lineno}"
        return RunFailedError(
            f"{what}; {doing}. If it is only slow, raise prefetch.timeout_s. If it hangs, find out what that line "
            "waits for, such as a network folder."
        )

    def _run(self) -> None:
        # This wait needs no limit: `close` wakes the thread, and a daemon thread ends with the process.
        while (work := self._work.get()) is not None:
            self._build_one(*work)
            # Without this, `work` would keep the batch alive while this thread waits for more work.
            del work

    def _build_one(self, step: int, future: Future[Timed]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._building, begin = step, time.perf_counter()
        try:
            batch = self._build(step)
        except BaseException as error:  # noqa: BLE001 - `next` raises it to its caller
            self._building = None
            future.set_exception(error)
        else:
            self._building = None
            future.set_result((batch, time.perf_counter() - begin))
