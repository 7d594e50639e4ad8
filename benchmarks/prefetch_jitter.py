"""Measure how much time each depth of prefetching loses if the times of collation and steps vary."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from spurline.data.batch import TrainingBatch
from spurline_collation_fast.configs import AsyncPrefetchConfig
from spurline_collation_fast.prefetch import AsyncPrefetch

DEPTHS = (1, 2, 4)
SIMULATED_STEPS = 20_000
MEAN_STEP_S = 0.01


def measure_jitter(ready: TrainingBatch, steps: int) -> dict[str, dict[str, float]]:
    """Return the lost time of each depth: in a long simulation, by sleeping threads, and simulated with their times."""
    figures: dict[str, dict[str, float]] = {}
    long = draw(SIMULATED_STEPS)
    for depth in DEPTHS:
        total, produced, consumed = sleep_through(ready, steps, depth)
        figures[f"depth {depth}"] = {
            "simulated": lost(simulate(*long, depth), *long),
            "threads": lost(total, produced, consumed),
            "threads_simulated": lost(simulate(produced, consumed, depth), produced, consumed),
        }
    return figures


def draw(steps: int) -> tuple[list[float], list[float]]:
    """Draw lognormal times to produce and to consume each batch. Their means are 0.8 and 1."""
    random = np.random.default_rng(0)
    return (0.8 * random.lognormal(-0.125, 0.5, steps)).tolist(), random.lognormal(-0.02, 0.2, steps).tolist()


def simulate(produce: Sequence[float], consume: Sequence[float], depth: int) -> float:
    """Return the time at which all batches are consumed, if at most `depth` batches are ready or in production."""
    produced = consumed = 0.0
    taken: list[float] = []
    for number, (production, consumption) in enumerate(zip(produce, consume, strict=True)):
        slot_is_free = taken[number - depth] if number >= depth else 0.0
        produced = max(produced, slot_is_free) + production
        taken.append(max(consumed, produced))
        consumed = taken[-1] + consumption
    return consumed


def sleep_through(ready: TrainingBatch, steps: int, depth: int) -> tuple[float, list[float], list[float]]:
    """Return the total seconds, and the real seconds of each production and consumption, since sleeps take too long."""
    produce, consume = ([MEAN_STEP_S * value for value in values] for values in draw(steps))
    produced: list[float] = []
    consumed: list[float] = []

    def build(step: int) -> TrainingBatch:
        produced.append(_slept(produce[step - 1]))
        return ready

    prefetch = AsyncPrefetch(AsyncPrefetchConfig(depth=depth), build=build, last_step=steps)
    begin = time.perf_counter()
    prefetch.start(1)
    for step, seconds in enumerate(consume, start=1):
        prefetch.next(step)
        consumed.append(_slept(seconds))
    total = time.perf_counter() - begin
    prefetch.close()
    return total, produced, consumed


def lost(total: float, produce: Sequence[float], consume: Sequence[float]) -> float:
    """Return the lost share of time, compared with production and consumption that never wait for each other."""
    return total / max(sum(produce), sum(consume)) - 1


def _slept(seconds: float) -> float:
    begin = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begin
