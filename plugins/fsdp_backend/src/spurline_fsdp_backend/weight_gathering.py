"""Bring whole tensors together out of the ranks' shards, a few at a time.

Place on the way: shards -> whole tensors on all ranks -> weights under Hugging Face names -> files that the ranks
write, or numpy arrays from the first rank. No process ever holds more than a bucket and what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from spurline.model.weight_files import FilePlan, WeightFile
from spurline.model.weights import NamedWeights

BUCKET_BYTES = 64 << 20
"""How much is gathered at a time."""

Bucket = tuple[int, int]
"""Groups of tensors that leave the model together: number of the first, and of the one after the last."""


class WeightGathering:
    """Gathers the weights of a sharded model. Every rank makes the same plan, from names and shapes.

    adapted: whether the model carries LoRA adapters, which are merged.
    """

    def __init__(self, causal: PreTrainedModel, *, adapted: bool) -> None:
        self._causal = causal
        self._named = NamedWeights(causal, adapted=adapted)

    def buckets(self, max_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """All weights in order, in buckets of at most so many bytes; a larger group of tensors has one of its own.

        dtype: in which weights are gathered; None: in that of the model.
        """
        first, used = 0, 0
        for number, group in enumerate(self._named.groups):
            size = sum(weight.numel() * (dtype or weight.dtype).itemsize for weight in group.weights.values())
            if first < number and used + size > max_bytes:
                yield first, number
                first, used = number, 0
            used += size
        yield first, len(self._named.groups)

    def gather(self, bucket: Bucket, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """(hf_name, whole tensor) of a bucket, on the device, on every rank. A collective."""
        # Asked for anew: what a forward pass has gathered is given back by this.
        state = self._causal.state_dict(keep_vars=True)
        weights: dict[str, Tensor] = {}
        for group in self._named.groups[slice(*bucket)]:
            # Half of the bytes to send; adapters are merged in full precision before.
            early = None if group.is_merged else dtype
            whole = {source: gather(_cast(state[source].detach(), early)) for source in group.sources}
            made = self._named.weights_of(group, whole)
            weights |= {name: _cast(weight, dtype) for name, weight in made.items()}
        return weights

    def write(
        self, folder: Path, dtype: torch.dtype, max_file_bytes: int, doing: Callable[[str], None]
    ) -> OSError | None:
        """Write the weights as `Backend.write_weights` says; the ranks take turns with the files. A collective.

        Returns why this rank could not write its files, if it could not.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        plan = FilePlan.of(self._named.layout, dtype, max_file_bytes)
        own = list(plan.files)[rank::world]
        weights = self._all(dtype, doing)
        failure: OSError | None = None
        try:
            with ExitStack() as stack:
                files = {name: stack.enter_context(WeightFile(folder / name, plan.files[name])) for name in own}
                for name, weight in weights:
                    if plan.file_of[name] in files:
                        files[plan.file_of[name]].put(name, weight)
                    # It is given back before the next one is gathered.
                    del weight
            if rank == 0:
                plan.write_index(folder)
        except OSError as error:
            # Without the frames, which hold a weight.
            failure = error.with_traceback(None)
        # The others can gather only together with this rank.
        for _ in weights:
            pass
        return failure

    def _all(self, dtype: torch.dtype, doing: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
        """All weights, gathered a group at a time; each step to the next group is a collective."""
        count = len(self._named.groups)
        for number in range(count):
            doing(f"writing weights, {number + 1} of {count}")
            yield from self.gather((number, number + 1), dtype).items()


def gather(value: Tensor) -> Tensor:
    """The whole tensor. A collective for a shard."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def as_arrays(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, NDArray[Any]]]:
    """As they travel between processes; numpy has no bf16, and fp32 holds it exactly."""
    return [(name, value.float().cpu().numpy()) for name, value in tensors]


def gather_gradients(parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """(name, whole gradient) of each parameter, on every rank. A collective."""
    return [
        (name, gather(torch.zeros_like(value) if value.grad is None else value.grad).detach())
        for name, value in parameters.items()
    ]


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
