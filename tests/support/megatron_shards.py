"""Ranks of the megatron backend as checkpoints see them, without Megatron: any model, grid and cut, in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import HeldParameter, held_parameters, whole_shapes
from spurline_megatron_backend.trained_model import Owned

DENSE = Architecture(
    model_type="qwen2",
    num_layers=5,
    hidden=8,
    ffn=8,
    heads=4,
    key_value_heads=4,
    head_dim=2,
    vocabulary=13,
    tied=False,
    norm_epsilon=1e-6,
    qkv_bias=True,
)
TIED = replace(DENSE, model_type="qwen3", tied=True, qkv_bias=False, qk_norm=True)
EXPERTS = replace(TIED, model_type="qwen3_moe", tied=False, num_experts=4, experts_per_token=2, expert_ffn=4)

DENSE_GRIDS = [
    Grid(1),
    Grid(2),
    Grid(3),
    Grid(2, tensor=2),
    Grid(4, tensor=2),
    Grid(4, context=2),
    Grid(2, pipeline=2),
    Grid(4, pipeline=2, virtual_stages=2, tensor=2),
    Grid(8, tensor=2, context=2, pipeline=2),
    Grid(4, tensor=4),
]
EXPERT_GRIDS = [
    *DENSE_GRIDS,
    Grid(4, expert=2),
    Grid(4, tensor=2, expert=2),
    Grid(4, tensor=2, expert=2, expert_tensor=2),
    Grid(8, tensor=2, pipeline=2, expert=2),
    Grid(4, expert=4),
]


@dataclass
class ShardedState:
    """The whole weights of a model and the state of AdamW, by name. steps: the count of every parameter."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    steps: float = 7.0


def some_state(architecture: Architecture, seed: int, *, critic: bool = False) -> ShardedState:
    generator = torch.Generator().manual_seed(seed)
    shapes = whole_shapes(architecture, critic=critic)
    weights, first, second = (
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(3)
    )
    return ShardedState(weights, {"exp_avg": first, "exp_avg_sq": second})


def local_parameter(held: HeldParameter, whole: Mapping[str, Tensor]) -> Tensor:
    """The flattened parameter of a rank, out of whole tensors."""
    flat = torch.zeros(math.prod(held.shape))
    for part in held.parts:
        assert tuple(whole[part.name].shape) == part.shape
        cut = tuple(slice(low, high) for low, high in zip(part.box.offset, part.box.end, strict=True))
        flat[part.begin : part.end] = whole[part.name][cut].reshape(-1)
    return flat


@dataclass
class SimulatedRank:
    """The parts that the optimizer of a rank holds."""

    rank: int
    owned: list[Owned] = field(default_factory=list[Owned])


def simulated_ranks(
    architecture: Architecture, grid: Grid, state: ShardedState | None, random: Random, *, critic: bool = False
) -> list[SimulatedRank]:
    """All ranks of a grid, whose optimizers share buffers at random places.

    Parameters lie in a buffer one after the other, with gaps, one for experts and one for all others, as Megatron's
    distributed optimizer has them. state: None for values that are not there yet.
    """
    ranks = [SimulatedRank(rank) for rank in range(grid.ranks)]
    groups: dict[tuple[Any, ...], list[SimulatedRank]] = {}
    for rank in ranks:
        place = grid.place(rank.rank)
        dense, expert = (place.pipeline, place.tensor), (place.pipeline, place.expert, place.expert_tensor)
        groups.setdefault((False, *dense), []).append(rank)
        groups.setdefault((True, *expert), []).append(rank)
    for (is_expert, *_), members in groups.items():
        parts = held_parameters(architecture, grid, grid.place(members[0].rank), critic=critic)
        mine = [held for part in parts for held in part.values() if held.is_expert == is_expert]
        starts = [0]
        for held in mine:
            starts.append(starts[-1] + math.prod(held.shape) + random.randrange(3))
        cuts = sorted(random.randrange(starts[-1] + 1) for _ in members[1:])
        for member, (low, high) in zip(members, pairwise([0, *cuts, starts[-1]]), strict=True):
            for held, start in zip(mine, starts, strict=False):
                begin, end = max(low - start, 0), min(high - start, math.prod(held.shape))
                if begin < end:
                    member.owned.append(_owned(held, (begin, end), state))
    return ranks


def _owned(held: HeldParameter, span: tuple[int, int], state: ShardedState | None) -> Owned:
    cut = slice(*span)
    if state is None:
        return Owned(held, span, torch.full((span[1] - span[0],), torch.nan), {"stale": torch.ones(())})
    kept: dict[str, Any] = {key: local_parameter(held, whole)[cut] for key, whole in state.moments.items()}
    kept["step"] = torch.tensor(state.steps)
    kept["phase"] = 3
    return Owned(held, span, local_parameter(held, state.weights)[cut], kept)
