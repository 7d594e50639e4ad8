"""Open the process groups of Megatron-core, once in a process, and say where this rank stands in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from spurline_megatron_backend.grid import Grid, Place


@dataclass(frozen=True)
class Groups:
    """The groups of this rank. context: None where each rank has its own sequences."""

    grid: Grid
    place: Place
    tensor: ProcessGroup
    context: ProcessGroup | None


def open_groups(grid: Grid, rank: int, timeout_s: float, seed: int) -> Groups:
    """Open the groups; a collective. timeout_s: of an exchange. seed: of Megatron's own generators."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=grid.virtual_stages if grid.virtual_stages > 1 else None,
        context_parallel_size=grid.context,
        expert_model_parallel_size=grid.expert,
        expert_tensor_parallel_size=grid.expert_tensor,
        # Handed on to timedelta, which takes parts of minutes.
        distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed % 2**31)
    place = grid.place(rank)
    _check(grid, place)
    # Megatron's own functions say nothing of what they return.
    state: Any = parallel_state
    context = state.get_context_parallel_group() if grid.context > 1 else None
    return Groups(grid, place, state.get_tensor_model_parallel_group(), context)


def _check(grid: Grid, place: Place) -> None:
    """Our numbers are Megatron's: weights are divided by ours, and exchanged by theirs."""
    state: Any = parallel_state
    theirs = Place(
        tensor=state.get_tensor_model_parallel_rank(),
        context=state.get_context_parallel_rank(),
        data=state.get_data_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
        expert=state.get_expert_model_parallel_rank(),
        expert_tensor=state.get_expert_tensor_parallel_rank(),
        expert_data=torch.distributed.get_rank(state.get_expert_data_parallel_group()),
    )
    assert place == theirs, (grid, place, theirs)
