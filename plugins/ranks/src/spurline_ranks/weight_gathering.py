"""Gather whole tensors from the parts that ranks hold, a few at a time.

Data flow: parts -> whole tensors on the rank that wants them -> weights under Hugging Face names -> files that
the ranks write, or numpy arrays from the first rank. A process never holds more than one bucket and its converted copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from spurline_models.weight_files import FilePlan, WeightFile
from spurline_models.weights import GroupedWeights

BUCKET_BYTES = 64 << 20
"""Bytes of one bucket."""

Bucket = tuple[int, int]
"""A range of group numbers: the weights of these groups are gathered together."""


class Gathers(Protocol):
    """Gathers tensors that are divided among the ranks of a backend."""

    def gather(self, wanted: Mapping[int, Sequence[str]], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Send whole tensors to the ranks that want them. All ranks must call this together with the same arguments.

        Args:
            wanted: The names of the tensors that each rank wants. Ranks that want nothing may be left out.
            dtype: The dtype to which floating point values are cast before they are sent, or None.

        Returns:
            The tensors that this rank wants, by their names in the model, on the device.
        """
        ...

    def owner_of(self, names: Sequence[str]) -> int:
        """Return the rank that can gather these tensors with fewest bytes sent. The result is equal on all ranks."""
        ...


class WeightGathering:
    """Gathers the weights of a sharded model or adapter. All ranks derive the same plan from names and shapes."""

    def __init__(self, named: GroupedWeights, gathers: Gathers) -> None:
        self._named, self._gathers = named, gathers

    @cached_property
    def _owners(self) -> list[int]:
        return [self._gathers.owner_of(group.sources) for group in self._named.groups]

    def owner_of(self, bucket: Bucket) -> int:
        """Return the owner of the first weights of a bucket; see `Gathers.owner_of`."""
        return self._owners[bucket[0]]

    def buckets(
        self, max_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None, *, by_owner: bool = False
    ) -> Iterator[Bucket]:
        """Yield all weights in order, in buckets.

        Args:
            max_bytes: Maximum size of a bucket in bytes. A larger group of tensors gets a bucket of its own.
            dtype: The dtype in which floating point weights are gathered. If None, they keep the dtype of the model.
            by_owner: Whether all weights of a bucket have the same owner.
        """
        first, used = 0, 0
        for number, group in enumerate(self._named.groups):
            size = sum(_nbytes(weight, dtype) for weight in group.weights.values())
            is_of_another = by_owner and self._owners[number] != self._owners[first]
            if first < number and (used + size > max_bytes or is_of_another):
                yield first, number
                first, used = number, 0
            used += size
        yield first, len(self._named.groups)

    def gather(
        self, bucket: Bucket, dtype: torch.dtype | None = None, destinations: Collection[int] = (0,)
    ) -> dict[str, Tensor]:
        """Return a bucket's weights on the device, or {} outside of `destinations`. All ranks call this together."""
        groups = self._named.groups[slice(*bucket)]
        whole: dict[str, Tensor] = {}
        # Weights without adapters are cast before sending, which halves the bytes. Others are cast after merging.
        for is_merged, early in ((False, dtype), (True, None)):
            names = [source for group in groups if group.is_merged == is_merged for source in group.sources]
            if names:
                whole |= self._gathers.gather(dict.fromkeys(sorted(destinations), names), early)
        weights: dict[str, Tensor] = {}
        if dist.get_rank() in destinations:
            for group in groups:
                made = self._named.weights_of(group, {source: whole.pop(source) for source in group.sources})
                weights |= {name: cast(weight, dtype) for name, weight in made.items()}
        return weights

    def write(
        self, folder: Path, dtype: torch.dtype, max_file_bytes: int, doing: Callable[[str], None]
    ) -> OSError | None:
        """Write the weights as in `Backend.write_weights`. All ranks call this together. Each writes some of the files.

        Returns:
            The error if this rank could not write its files, else None.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        plan = FilePlan.of(self._named.layout, dtype, max_file_bytes)
        writer_of = {name: number % world for number, name in enumerate(plan.files)}
        weights = self._all(plan, writer_of, dtype, doing)
        failure: OSError | None = None
        try:
            with ExitStack() as stack:
                files = {
                    name: stack.enter_context(WeightFile(folder / name, layout))
                    for name, layout in plan.files.items()
                    if writer_of[name] == rank
                }
                for name, weight in weights:
                    if plan.file_of[name] in files:
                        files[plan.file_of[name]].put(name, weight)
                    # Free the weight before the next one is gathered.
                    del weight
            if rank == 0:
                plan.write_index(folder)
        except OSError as error:
            # The frames of the traceback would keep a weight in memory.
            failure = error.with_traceback(None)
        # Gathering is a collective: after an error this rank still helps the others.
        for _ in weights:
            pass
        return failure

    def _all(
        self, plan: FilePlan, writer_of: Mapping[str, int], dtype: torch.dtype, doing: Callable[[str], None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of this rank's files. Gathering each group of tensors is a collective."""
        count = len(self._named.groups)
        for number, group in enumerate(self._named.groups, start=1):
            doing(f"writing weights, {number} of {count}")
            writers = {writer_of[plan.file_of[name]] for name in group.weights}
            yield from self.gather((number - 1, number), dtype, writers).items()


def _nbytes(weight: Tensor, dtype: torch.dtype | None) -> int:
    kind = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
    return weight.numel() * kind.itemsize


def as_arrays(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, NDArray[Any]]]:
    """Return tensors as fp32 numpy arrays, which can be sent to other processes."""
    return [(name, value.float().cpu().numpy()) for name, value in tensors]


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a floating point tensor to this dtype, unless the dtype is None. Other tensors stay as they are."""
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
