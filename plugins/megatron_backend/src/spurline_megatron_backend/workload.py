"""Describe a layout and a training step by the numbers that decide memory and communication. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid, Place, part_sizes
from spurline_megatron_backend.parts import held_parameters

Recompute = Literal["none", "selective", "full"]

UNEVEN_EXPERTS = 1.2
"""Assumed load of the busiest rank of an expert-parallel group, relative to an even share; no router is even."""


@dataclass(frozen=True)
class Layout:
    """How ranks divide a model, and how each computes its part.

    A micro-batch is filled up to `microbatch` tokens; if None, a rank computes all its rows at once.
    """

    grid: Grid
    microbatch: int | None = None
    recompute: Recompute = "none"
    sequence_parallel: bool = True

    @property
    def sequence_share(self) -> int:
        """The number of ranks that divide the tokens in the layers that tensor parallelism does not divide."""
        return self.grid.tensor if self.sequence_parallel else 1

    @property
    def expert_load(self) -> float:
        """The tokens that are routed to the busiest rank's experts, relative to an even share."""
        return UNEVEN_EXPERTS if self.grid.expert > 1 else 1.0


@dataclass(frozen=True)
class Step:
    """An optimizer step: the tokens of its longest row, and those of all rows over all ranks."""

    row_length: int
    tokens: int

    def tokens_of_microbatch(self, layout: Layout) -> int:
        """Return the tokens that one copy of the model computes at once, before context parallelism divides them."""
        share = math.ceil(self.tokens / layout.grid.data)
        bound = share if layout.microbatch is None else min(share, layout.microbatch)
        # A row is never divided between micro-batches.
        return max(bound, min(self.row_length, self.tokens))

    def num_microbatches(self, layout: Layout) -> int:
        """Return the number of micro-batches that each rank computes."""
        share = math.ceil(self.tokens / layout.grid.data)
        number = max(1, math.ceil(share / max(1, self.tokens_of_microbatch(layout))))
        return layout.grid.rounded_up(number)


@dataclass(frozen=True)
class Values:
    """The number of values in a rank's experts, and in its other parameters."""

    dense: int
    expert: int

    def __add__(self, other: Values) -> Values:
        return Values(self.dense + other.dense, self.expert + other.expert)

    def __sub__(self, other: Values) -> Values:
        return Values(self.dense - other.dense, self.expert - other.expert)

    def __mul__(self, times: int) -> Values:
        return Values(self.dense * times, self.expert * times)

    @property
    def all(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class _Held:
    """The values that a rank holds for one layer, and outside layers in the first, the last or the only stage."""

    layer: Values
    first: Values
    last: Values
    only: Values


@dataclass(frozen=True)
class Stages:
    """The layers and values that the pipeline stages of a model hold."""

    architecture: Architecture
    grid: Grid
    critic: bool = False

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The number of layers of each part, by stage."""
        return _layers(self.architecture.num_layers, self.grid.pipeline, self.grid.virtual_stages)

    def is_last(self, stage: int) -> bool:
        return stage == self.grid.pipeline - 1

    def values(self, stage: int) -> Values:
        """Count the values of each rank of this stage; all have equally many, padding of the vocabulary included."""
        grid = self.grid
        held = _held(self.architecture, grid.tensor, grid.expert, grid.expert_tensor, self.critic)
        found = held.layer * sum(self.layers[stage])
        if grid.pipeline == 1:
            return found + held.only
        if stage == 0:
            return found + held.first
        return found + held.last if self.is_last(stage) else found


@lru_cache(maxsize=1024)
def _layers(num_layers: int, pipeline: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    sizes = part_sizes(num_layers, pipeline * virtual_stages)
    return tuple(tuple(sizes[stage::pipeline]) for stage in range(pipeline))


@lru_cache(maxsize=1024)
def _held(architecture: Architecture, tensor: int, expert: int, expert_tensor: int, critic: bool) -> _Held:
    # All layers are alike, so a model of three layers shows what any number of layers holds.
    cut = replace(architecture, num_layers=3)

    def values(pipeline: int, stage: int) -> Values:
        grid = Grid(tensor * expert * expert_tensor * pipeline, tensor, pipeline, 1, 1, expert, expert_tensor)
        place = Place(0, 0, 0, stage, 0, 0, 0)
        held = [parameter for part in held_parameters(cut, grid, place, critic=critic) for parameter in part.values()]
        experts = sum(math.prod(parameter.shape) for parameter in held if parameter.is_expert)
        return Values(sum(math.prod(parameter.shape) for parameter in held) - experts, experts)

    layer = values(3, 1)
    return _Held(layer, values(3, 0) - layer, values(3, 2) - layer, values(1, 0) - layer * 3)
