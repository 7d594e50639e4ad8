"""Prefetch `serial`: build each batch when its step begins, on the loop's thread."""

from __future__ import annotations

import time

from spurline.data.batch import TrainingBatch
from spurline.data.configs import SerialPrefetchConfig
from spurline.protocols.prefetch import BuildBatch


class SerialPrefetch:
    """Builds each batch on demand, without threads."""

    def __init__(self, config: SerialPrefetchConfig, build: BuildBatch, last_step: int) -> None:
        self._build = build
        self._last_step = last_step
        self._expected: int | None = None
        self._collate_s = 0.0

    def start(self, step: int) -> None:
        self._expected = step

    def next(self, step: int) -> TrainingBatch:
        assert step == self._expected, f"steps are served in order: expected {self._expected}, asked for {step}"
        assert step <= self._last_step, (step, self._last_step)
        begin = time.perf_counter()
        batch = self._build(step)
        self._collate_s = time.perf_counter() - begin
        self._expected = step + 1
        return batch

    def metrics(self) -> dict[str, float]:
        return {"time/collate": self._collate_s, "time/collate_wait": self._collate_s}

    def close(self) -> None:
        self._expected = None
