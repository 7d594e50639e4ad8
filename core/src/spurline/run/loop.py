"""The training loop. SFT, synchronous RL and asynchronous RL share it, and differ only in the source of batches.

A source supplies batches, a backend applies updates, hooks observe. The loop knows nothing about ranks, datasets or
algorithms.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol

from spurline.protocols.backend import Backend
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.source import BatchSource


class LoopedRun(Protocol):
    """The part of a run that the loop uses. `spurline.run.session.Session` implements it."""

    hooks: Any
    source: BatchSource
    backend: Backend
    batches: Prefetch

    def remaining_steps(self) -> Iterator[int]: ...

    def maybe_evaluate(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]: ...

    def saving_metrics(self) -> dict[str, float]: ...

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def maybe_checkpoint(self, step: int) -> None: ...


def train(run: LoopedRun) -> None:
    """Train the remaining steps of a run whose components are built and, on a resume, restored.

    The metrics of a step are written before its checkpoint. So the record of a run that was killed and resumed
    has each step exactly once. The checkpoint comes after `on_step_end`, so it includes the state of hooks after the
    step. An exception leaves the last checkpoint as it was.
    """
    for step in run.remaining_steps():
        clock = StepClock()
        run.hooks.on_step_start(step=step)
        with clock("batch"):
            batch = run.batches.next(step)
        metrics = {**run.hooks.train_step(step=step, batch=batch), "epoch": run.source.epoch(step)}
        with clock("after_update"):
            metrics |= run.source.after_update(step, run.backend)
        with clock("evaluate"):
            metrics |= run.maybe_evaluate(step, metrics)
        metrics |= run.batches.metrics() | run.saving_metrics() | clock.metrics()
        run.record(step, metrics)
        run.hooks.on_step_end(step=step, metrics=MappingProxyType(metrics))
        run.maybe_checkpoint(step)
        batch.release()


class StepClock:
    """Measures the wall time of one step and of its parts."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Generator[None]:
        """Measure a part. Times of the same part add up."""
        begin = time.perf_counter()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """Return `time/PART` and `time/step` so far, in seconds."""
        parts = {f"time/{name}": seconds for name, seconds in self._parts.items()}
        return {**parts, "time/step": time.perf_counter() - self._begin}
