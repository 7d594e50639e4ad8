"""Decide between this process and slice workers by what will be done sooner.

In: what the first rows cost, and how many are left. Out: a number of workers. The choice changes the time, never the
tokens.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spurline_collation_fast.tokenization.chunks import Chunk

WORKER_START_S = 2.2
"""Processor seconds until a worker encodes its first row: imports, the tokenizer, opening the data. Machines take 1.8
to 3; too low makes small data wait for workers, too high keeps some of their gain from data of a few seconds."""

CLEARLY = 1.1
"""Workers have to be this much sooner: processes cost memory, and an estimate can be wrong."""

MEASURE_S = 0.5
"""How long the first rows are measured."""

MAX_WORKERS = 64
"""More gain nothing: this process reads what all of them write."""


@dataclass(frozen=True)
class RowCost:
    """What a row costs in this process. wall_s: with all threads. cpu_s: processor time, all threads together."""

    wall_s: float
    cpu_s: float


class CostMeter:
    """Measures the cost of rows from when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def cost(self, num_rows: int) -> RowCost:
        """Cost of one of the `num_rows` rows encoded since."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return RowCost(wall / num_rows, cpu / num_rows)


def for_seconds(chunks: Iterator[Chunk], seconds: float) -> Iterator[Chunk]:
    """Chunks until the time is over; the rest stays in the iterator."""
    end = time.perf_counter() + seconds
    for chunk in chunks:
        yield chunk
        if time.perf_counter() >= end:
            return


def workers_worth_starting(num_rows: int, cost: RowCost, most: int, clearly: float) -> int:
    """Workers for so many rows, at most `most`; 0 when this process alone takes less than `clearly` times as long."""
    workers = min(most, num_rows)
    # One alone is never sooner: this process has its start behind it.
    if workers < 2:
        return 0
    here = num_rows * cost.wall_s
    # All start at once, each on a core of its own.
    there = WORKER_START_S + max(0, num_rows - rows_while_they_start(cost)) * cost.cpu_s / workers
    return workers if there * clearly < here else 0


def slices_worth_a_start(num_rows: int, cost: RowCost) -> int:
    """Into how many slices the rows can be cut that take a worker as long as its start."""
    return int(num_rows * max(cost.wall_s, cost.cpu_s) / WORKER_START_S)


def rows_while_they_start(cost: RowCost) -> int:
    """Rows that this process encodes until workers encode theirs: it has half of the cores' time for so long."""
    return int(WORKER_START_S / (2 * cost.wall_s))


def available_cores() -> int:
    """Cores that this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, cores_of_quota())))


def idle_cores() -> int:
    """Those of them that others leave: on a busy machine rows take long here, and would in workers as well."""
    idle = (os.cpu_count() or 1) - os.getloadavg()[0]
    return max(1, min(available_cores(), math.floor(idle)))


def cores_of_quota(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' worth of time that the control groups (v2) of this process grant; infinite without a quota.

    groups: where they are mounted. own: names the process's group.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    least = math.inf
    # The tightest of all groups above counts.
    for group in (groups / name, *(groups / name).parents):
        if not group.is_relative_to(groups):
            break
        try:
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            least = min(least, math.inf if quota == "max" else int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return least
