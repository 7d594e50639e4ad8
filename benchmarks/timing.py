"""Time candidates that take turns, so that a busy machine does not change their ratio. Most benchmarks use this module.

A gate compares a ratio of smallest wall times with its limit. It may also compare the same ratio of smallest process
times, and then fails only if both ratios miss the limit. Other processes increase the wall time, and helper threads of
libraries increase the process time, but both rarely happen together.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: the smallest and the median wall time, and the smallest CPU time of all threads."""

    min_s: float
    median_s: float
    min_cpu_s: float


@dataclass(frozen=True)
class Gate:
    """A figure with its limit. `cpu_value` is the figure by process time. The gate is met if either meets the limit."""

    name: str
    value: float
    limit: float
    at_least: bool
    cpu_value: float | None = None

    @property
    def met(self) -> bool:
        values = [self.value] if self.cpu_value is None else [self.value, self.cpu_value]
        return any(value >= self.limit if self.at_least else value <= self.limit for value in values)

    def __str__(self) -> str:
        by_cpu = "" if self.cpu_value is None else f" (process time: {self.cpu_value:.3g})"
        sign = ">=" if self.at_least else "<="
        return (
            f"{'met    ' if self.met else 'NOT MET'}  {self.name}: {self.value:.3g}{by_cpu}, gate {sign} {self.limit:g}"
        )


def round_robin(functions: Mapping[str, Callable[[], object]], repeats: int | Mapping[str, int]) -> dict[str, Timing]:
    """Time each function `repeats` times, in turns, after one call of each function that is not timed.

    `repeats` is a number for all functions, or a number for each name. The garbage collector is off meanwhile.
    """
    counts = dict.fromkeys(functions, repeats) if isinstance(repeats, int) else dict(repeats)
    wall: dict[str, list[float]] = {name: [] for name in functions}
    cpu: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    gc.collect()
    gc.disable()
    try:
        for turn in range(max(counts.values())):
            for name, function in functions.items():
                if turn < counts[name]:
                    cpu_start, start = time.process_time(), time.perf_counter()
                    result = function()
                    wall[name].append(time.perf_counter() - start)
                    cpu[name].append(time.process_time() - cpu_start)
                    # The next candidate's time must not contain the freeing of this result.
                    del result
    finally:
        gc.enable()
    return {name: Timing(min(wall[name]), statistics.median(wall[name]), min(cpu[name])) for name in functions}


def speedup_gate(name: str, slow: Timing, fast: Timing, at_least: float) -> Gate:
    """Return the gate that `fast` is at least `at_least` times as fast as `slow`."""
    return Gate(name, slow.min_s / fast.min_s, at_least, True, slow.min_cpu_s / fast.min_cpu_s)


def cost_gate(name: str, timing: Timing, base: Timing, at_most: float) -> Gate:
    """Return the gate that `timing` is at most `at_most` times `base`."""
    return Gate(name, timing.min_s / base.min_s, at_most, False, timing.min_cpu_s / base.min_cpu_s)


def print_timings(title: str, timings: Mapping[str, Timing]) -> None:
    """Print a line for each candidate, in milliseconds."""
    print(f"{title}: ms, min wall | median wall | min process time")
    for name, timing in timings.items():
        print(f"  {name:<40} {timing.min_s * 1e3:10.3f} {timing.median_s * 1e3:10.3f} {timing.min_cpu_s * 1e3:10.3f}")


def print_gates(gates: Iterable[Gate]) -> None:
    """Print a line for each gate."""
    for gate in gates:
        print(gate)


def timings_as_json(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """Return timings for the `--json` output of a benchmark."""
    return {name: asdict(timing) for name, timing in timings.items()}


def gates_as_json(gates: Iterable[Gate]) -> list[dict[str, Any]]:
    """Return gates for the `--json` output of a benchmark."""
    return [{**asdict(gate), "met": gate.met} for gate in gates]
