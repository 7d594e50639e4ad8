"""Find the layouts of so many ranks that a model fits in, and order them by what ranks send each other in a step.

Every layout is tried that divides the model and the ranks, but tensor parallelism across machines, whose exchanges no
layer hides. Recomputing whole layers costs a third more computation whatever is sent, so those layouts come last.
Bytes and idle shares follow from the layout; how fast devices and networks are is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid, part_sizes
from spurline_megatron_backend.memory import MAIN_BYTES, Kept, estimate_fullest
from spurline_megatron_backend.workload import Layout, Recompute, Stages, Step
from spurline_models.backend_config import MemoryEstimate
from spurline_ranks.layout import divisors

RANKS_OF_MACHINE = 8
"""Devices of one machine, if nothing tells: of a DGX or HGX."""

MOST_IDLE = 0.1
"""Share of a step that ranks may wait for other stages, in a layout that is named if others fit."""

_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_MAX_PIPELINE = 64
_MICROBATCH = 4096
"""Tokens of a micro-batch that keep a device busy."""
_SMALL_SHARE = 1024
"""Tokens of a row below which it is not shared among more ranks."""


@dataclass(frozen=True)
class Candidate:
    """A layout, its memory on the fullest rank, the bytes that a rank sends in a step, and the share that it waits."""

    layout: Layout
    memory: MemoryEstimate
    sent: int
    idle: float


def evaluate(architecture: Architecture, layout: Layout, step: Step, kept: Kept) -> Candidate:
    """Return the layout with what it needs and sends."""
    return Candidate(
        layout,
        estimate_fullest(architecture, layout, step, kept),
        sent_bytes(architecture, layout, step, kept.computed_bytes),
        idle_share(architecture.num_layers, layout, step),
    )


def find_layouts(
    architecture: Architecture, ranks: int, step: Step, kept: Kept, usable_bytes: float, ranks_of_machine: int
) -> tuple[list[Candidate], Candidate]:
    """Try all layouts of so many ranks.

    Args:
        architecture: The model.
        ranks: Number of ranks. Every layout uses all of them.
        step: The largest step.
        kept: What is in memory beside the model.
        usable_bytes: Memory of a device that can be counted on.
        ranks_of_machine: Ranks within which tensor parallelism stays.

    Returns:
        The layouts that fit, those that send least first, and the layout that needs least memory.
    """
    fitting: list[Candidate] = []
    smallest: Candidate | None = None
    for grid in _grids(architecture, ranks, step, ranks_of_machine):
        for layout in _variants(architecture, grid, step):
            found = evaluate(architecture, layout, step, kept)
            if smallest is None or found.memory.peak < smallest.memory.peak:
                smallest = found
            if found.memory.peak <= usable_bytes:
                fitting.append(found)
                if found.idle <= MOST_IDLE:
                    break
    assert smallest is not None, "one copy of the model on each rank is a layout"
    busy = [found for found in fitting if found.idle <= MOST_IDLE] or fitting
    return sorted(busy, key=lambda found: (found.layout.recompute == "full", found.sent)), smallest


def idle_share(num_layers: int, layout: Layout, step: Step) -> float:
    """Return the share of a step in which ranks wait for other stages, the output layer not counted.

    Filling and emptying takes p - 1 turns beside v m of p stages of v parts and m micro-batches (Narayanan et al. 2021,
    arXiv:2104.04473), and all wait for the part that has most layers.
    """
    grid, number = layout.grid, step.num_microbatches(layout)
    turns = grid.virtual_stages * number + grid.pipeline - 1
    most = max(part_sizes(num_layers, grid.pipeline * grid.virtual_stages))
    return 1 - number * num_layers / grid.pipeline / (turns * most)


def sent_bytes(a: Architecture, layout: Layout, step: Step, computed_bytes: int) -> int:
    """Return the bytes that a rank sends in a step: for each micro-batch and layer, and once for the gradients."""
    grid = layout.grid
    tokens = math.ceil(step.tokens_of_microbatch(layout) / grid.context)
    passes = 3 if layout.recompute == "full" else 2
    # A gather before and a sum after attention and the feed-forward layer; experts exchange tokens instead.
    halves = 1 if a.num_experts else 2
    of_layer = halves * (2 * passes) * tokens * a.hidden * (grid.tensor - 1) / grid.tensor
    if grid.context > 1:
        keys = math.lcm(a.key_value_heads // grid.tensor, grid.context)
        exchanged = (2 * (a.heads // grid.tensor) + 2 * keys) * a.head_dim
        of_layer += passes * tokens * exchanged * (grid.context - 1) / grid.context
    if a.num_experts:
        copies = layout.expert_load * tokens / layout.sequence_share * a.experts_per_token * a.hidden
        # Tokens go to their experts and come back.
        of_layer += 2 * passes * copies * ((grid.expert - 1) / grid.expert + grid.expert_tensor - 1)
    of_microbatch = of_layer * math.ceil(a.num_layers / grid.pipeline)
    if grid.pipeline > 1:
        of_microbatch += 2 * grid.virtual_stages * tokens * a.hidden / layout.sequence_share
    stages = Stages(a, grid)
    values = max(map(stages.values, range(grid.pipeline)), key=lambda found: found.all)
    dense, experts = grid.data * grid.context, grid.expert_data
    # Gradients are summed in fp32, and weights gathered as they are computed with.
    after = (MAIN_BYTES + computed_bytes) * (
        values.dense * (dense - 1) / dense + values.expert * (experts - 1) / experts
    )
    return int(step.num_microbatches(layout) * of_microbatch * computed_bytes + after)


def _variants(architecture: Architecture, grid: Grid, step: Step) -> Iterator[Layout]:
    """Yield layouts of this grid, the cheapest in time first, with micro-batches of rows that keep a device busy."""
    share = max(step.row_length, math.ceil(step.tokens / grid.data))
    microbatch = min(share, max(1, _MICROBATCH // step.row_length) * step.row_length)
    for recompute in _RECOMPUTE:
        yield Layout(grid, microbatch, recompute, grid.tensor > 1)
        # Parts of a few layers wait less, and are sent more often.
        parts = architecture.num_layers // grid.pipeline // 4
        if grid.pipeline > 1 and parts > 1:
            yield Layout(replace(grid, virtual_stages=parts), microbatch, recompute, grid.tensor > 1)


def _grids(a: Architecture, ranks: int, step: Step, ranks_of_machine: int) -> Iterator[Grid]:
    most_context = max(1, step.row_length // _SMALL_SHARE)
    for tensor in divisors(math.gcd(a.heads, a.key_value_heads, 0 if a.num_experts else a.ffn)):
        if ranks % tensor or tensor > ranks_of_machine or ranks_of_machine % tensor:
            continue
        for pipeline in divisors(ranks // tensor):
            if pipeline > min(a.num_layers, _MAX_PIPELINE):
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
