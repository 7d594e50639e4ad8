"""Open the process groups of Megatron-core, once in a process, and find this rank's place in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from spurline_megatron_backend.grid import Grid, Place


@dataclass(frozen=True)
class Groups:
    """The place and the groups of this rank; `context` is None if each rank has its own sequences."""

    grid: Grid
    place: Place
    tensor: ProcessGroup
    context: ProcessGroup | None


def open_groups(grid: Grid, rank: int, timeout_s: float, seed: int) -> Groups:
    """Open the groups, with the time limit of an exchange and the seed of Megatron's generators. A collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=grid.virtual_stages if grid.virtual_stages > 1 else None,
        context_parallel_size=grid.context,
        expert_model_parallel_size=grid.expert,
        expert_tensor_parallel_size=grid.expert_tensor,
        # Megatron passes it to timedelta, which takes parts of minutes.
        distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed % 2**31)
    # Megatron's functions have no types.
    state: Any = parallel_state
    context = state.get_context_parallel_group() if grid.context > 1 else None
    return Groups(grid, grid.place(rank), state.get_tensor_model_parallel_group(), context)
