"""Find the layouts of so many devices that a model fits in, and rank them by the time of a step.

Every layout is tried that divides the model and the ranks, but tensor parallelism across machines, whose exchanges no
layer hides. Takes a second or two, on a machine without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.memory import MAIN_BYTES, Kept, fullest, optimizer_bytes
from spurline_megatron_backend.step_time import Speeds, StepTime, estimate_step, least_time
from spurline_megatron_backend.workload import Layout, Recompute, Stages, Step
from spurline_ranks.layout import divisors

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12)

MAX_PIPELINE = 64

SMALL_MICROBATCH = 4096
"""Tokens below which a micro-batch keeps no device busy, so that smaller ones are not tried."""

SMALL_SHARE = 1024
"""Tokens of a row below which sharing it among more ranks is not tried."""

ALIKE = 1.03
"""Layouts whose times differ by less are taken to be equally fast."""

FAR = 1.5
"""Times of the fastest above which a layout is not worth naming."""

_MICROBATCHES = (1, 2, 4)
"""Multiples of the smallest micro-batch that are tried."""


@dataclass(frozen=True)
class Candidate:
    """A layout, its bytes by part on the fullest rank, and the time of a step."""

    layout: Layout
    parts: dict[str, int]
    time: StepTime

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> tuple[str, int]:
        """The part that takes most, and its bytes."""
        return max(self.parts.items(), key=lambda part: part[1])


@dataclass(frozen=True)
class Found:
    """best: what fits, the fastest first, one for each way to divide the ranks. nearest: what comes nearest to fitting
    where nothing does."""

    best: Sequence[Candidate]
    nearest: Candidate | None


def find_layouts(
    architecture: Architecture, ranks: int, step: Step, kept: Kept, speeds: Speeds, usable_bytes: float
) -> Found:
    """Try all layouts of so many ranks. usable_bytes: of the memory of a device."""
    best: dict[Grid, Candidate] = {}
    nearest: Candidate | None = None
    fastest = math.inf
    for grid in _grids(architecture, ranks, step, speeds.ranks_of_machine):
        # What every variant of this grid holds; most that do not fit are told by it.
        least = _least(architecture, grid, kept)
        if least > usable_bytes and nearest is not None and nearest.total <= least:
            continue
        mine: Candidate | None = None
        for layout in _variants(architecture, grid, step):
            limit = min(FAR * fastest, math.inf if mine is None else mine.time.total)
            if least_time(architecture, layout, step, speeds) > limit:
                continue
            time = estimate_step(architecture, layout, step, speeds)
            if time.total > limit:
                continue
            found = Candidate(layout, fullest(architecture, layout, step, kept), time)
            if found.total <= usable_bytes:
                mine = found
                fastest = min(fastest, time.total)
            elif nearest is None or found.total < nearest.total:
                nearest = found
        if mine is not None:
            best[grid] = mine
    return Found(_ordered(best.values()), None if best else nearest)


def _ordered(found: Iterable[Candidate]) -> list[Candidate]:
    """The fastest first; of those that are as fast as an estimate can tell, the least exchange of tokens and memory."""
    rest = sorted(found, key=lambda candidate: candidate.time.total)
    ordered: list[Candidate] = []
    while rest:
        alike = [candidate for candidate in rest if candidate.time.total <= ALIKE * rest[0].time.total]
        ordered += sorted(alike, key=lambda candidate: (candidate.layout.grid.context, candidate.total))
        rest = rest[len(alike) :]
    return ordered


def _grids(architecture: Architecture, ranks: int, step: Step, ranks_of_machine: int) -> Iterator[Grid]:
    a = architecture
    most_context = max(1, step.row_length // SMALL_SHARE)
    for tensor in divisors(math.gcd(math.gcd(a.heads, a.key_value_heads), a.ffn if not a.num_experts else 0)):
        if ranks % tensor or tensor > ranks_of_machine or ranks_of_machine % tensor:
            continue
        for pipeline in divisors(ranks // tensor):
            if pipeline > min(a.num_layers, MAX_PIPELINE):
                continue
            for context in divisors(math.gcd(ranks // tensor // pipeline, a.heads // tensor)):
                if context > most_context:
                    break
                for expert, expert_tensor in _experts(a, ranks // pipeline, tensor):
                    yield Grid(ranks, tensor, pipeline, 1, context, expert, expert_tensor)


def _experts(architecture: Architecture, ranks_of_stage: int, tensor: int) -> Iterator[tuple[int, int]]:
    if not architecture.num_experts:
        yield 1, 1
        return
    for expert_tensor in sorted({1, tensor}):
        if architecture.expert_ffn % expert_tensor == 0 and ranks_of_stage % expert_tensor == 0:
            for expert in divisors(math.gcd(architecture.num_experts, ranks_of_stage // expert_tensor)):
                yield expert, expert_tensor


def _least(architecture: Architecture, grid: Grid, kept: Kept) -> float:
    """Bytes that weights, gradients and optimizer take on the fullest rank, however it computes."""
    stages = Stages(architecture, grid)
    layout = Layout(grid)
    return max(
        (kept.computed_bytes + MAIN_BYTES) * values.all
        + optimizer_bytes(layout, values, kept.optimizer, kept.computed_bytes)
        for values in map(stages.values, range(grid.pipeline))
    )


def _variants(architecture: Architecture, grid: Grid, step: Step) -> Iterator[Layout]:
    for virtual_stages in VIRTUAL_STAGES if grid.pipeline > 1 else (1,):
        if grid.pipeline * virtual_stages > architecture.num_layers:
            break
        for microbatch in microbatches(step, grid):
            for recompute in RECOMPUTE:
                yield Layout(replace(grid, virtual_stages=virtual_stages), microbatch, recompute, grid.tensor > 1)


def microbatches(step: Step, grid: Grid) -> list[int]:
    """Tokens of a micro-batch that are worth trying: multiples of the longest row, up to what a rank has in a step."""
    smallest = step.row_length * max(1, SMALL_MICROBATCH // step.row_length)
    share = max(step.row_length, math.ceil(step.tokens / grid.data))
    return sorted({min(share, smallest * times) for times in _MICROBATCHES})
