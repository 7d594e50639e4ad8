"""Prefetch `async`: while a step trains, the batches of the next ones are built on another thread.

Place on the way: source (or evaluation) -> build(step) -> batches in order -> loop. Since the order of the data is a
pure function of the step, building ahead crosses epochs freely and the batches are those of `core/serial`.
Keeps no position: what was built ahead of a checkpoint is built again after a resume.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from spurline.data.batch import TrainingBatch
from spurline.protocols.prefetch import BuildBatch
from spurline_collation_fast.ahead import BuildAhead
from spurline_collation_fast.configs import AsyncPrefetchConfig


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
