"""Let Megatron-core 0.16 run in a process without a GPU. Only ranks on the CPU import this module.

Megatron-core asks CUDA for a device, generators and streams without checking whether there is a GPU. This module
replaces the CUDA functions with CPU counterparts, in this process only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Stream:
    """Replaces CUDA streams and events. On the CPU everything runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    synchronize = record = wait = wait_stream = wait_event = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()


class _OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU when Megatron asks for CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


def run_on_cpu() -> None:
    """Replace functions that need CUDA. Call this after importing Megatron-core and before making a rank."""
    assert not torch.cuda.is_available(), "a rank on the CPU sees a GPU"
    cuda: Any = torch.cuda
    cpu = torch.device("cpu")
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda values, stream: None

    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    dispatcher.maybe_move_tensor_to_cpu = _as_asked
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    mappings._gather_along_first_dim = partial(_gathered, gather)
    mappings._reduce_scatter_along_first_dim = partial(_scattered, scatter)
    # Compiling Megatron-core's small functions would take seconds in every rank.
    torch.compiler.set_stance("force_eager")
    _OnCpu().__enter__()


def _as_asked(values: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return values.numpy() if as_numpy and isinstance(values, torch.Tensor) else values


def _gathered(
    gather: Callable[..., Tensor],
    values: Tensor,
    group: dist.ProcessGroup,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Gather rows as Megatron does. Ranks with fewer rows send padding, as gloo requires. This is a collective."""
    if output_split_sizes is None or group.size() == 1:
        return gather(values, group, None, use_global_buffer)
    longest = max(output_split_sizes)
    padded = values.new_zeros(longest, *values.shape[1:])
    padded[: len(values)] = values
    gathered = gather(padded, group).split(longest)
    return torch.cat([part[:size] for part, size in zip(gathered, output_split_sizes, strict=True)])


def _scattered(
    scatter: Callable[..., Tensor],
    values: Tensor,
    group: dist.ProcessGroup,
    input_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Sum over ranks as Megatron does, and give each rank some rows of the sum. This is a collective."""
    if input_split_sizes is None or group.size() == 1:
        return scatter(values, group, None, use_global_buffer)
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total.split(input_split_sizes)[group.rank()].clone()
