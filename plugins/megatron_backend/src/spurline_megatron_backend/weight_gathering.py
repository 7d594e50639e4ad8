"""Assemble whole tensors from the boxes (slices of tensors) that ranks hold.

Data flow: parameters of each rank -> boxes of Hugging Face tensors, sent by their owners to the ranks that want
them -> whole tensors there -> buckets for engines, files, or the controller. The owner of a box follows from the sizes
of the model and the grid, so each rank knows all messages in advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import HeldParameter, Part, held_parameters
from spurline_ranks.pieces import Box, Shape

IN_FLIGHT_BYTES = 64 << 20
"""The bytes that a rank receives at a time."""

Held = Sequence[tuple[HeldParameter, Tensor]]
"""The parameters of a rank, each with a tensor of its shape, such as its values or its gradient."""


@dataclass(frozen=True)
class OwnedBox:
    """A box of a tensor, and the rank that sends the box to other ranks."""

    name: str
    box: Box
    owner: int


@dataclass(frozen=True)
class BoxOwners:
    """The owner of each box of the tensors of a model. The owner is the first rank that holds the box.

    Attributes:
        shapes: Shapes of all tensors, by name.
        boxes: The boxes of each tensor, in the order of their owners. Together they cover the tensor.
    """

    shapes: Mapping[str, Shape]
    boxes: Mapping[str, tuple[OwnedBox, ...]]

    def most_of(self, names: Collection[str]) -> int:
        """Return the rank that owns most values of these tensors. On a tie, return the lowest rank."""
        values: dict[int, int] = {}
        for name in names:
            for part in self.boxes[name]:
                values[part.owner] = values.get(part.owner, 0) + part.box.num_values
        return min(values, key=lambda rank: (-values[rank], rank))

    def rounds(self, names: Collection[str], dtype: torch.dtype, max_bytes: int) -> Iterator[list[OwnedBox]]:
        """Yield the boxes of these tensors in rounds of at most `max_bytes`, in the order of their owners.

        A larger box has a round of its own.
        """
        parts = sorted((part for name in names for part in self.boxes[name]), key=lambda part: part.owner)
        taken: list[OwnedBox] = []
        used = 0
        for part in parts:
            size = part.box.num_values * dtype.itemsize
            if taken and used + size > max_bytes:
                yield taken
                taken, used = [], 0
            taken.append(part)
            used += size
        if taken:
            yield taken


@cache
def box_owners(architecture: Architecture, grid: Grid, *, critic: bool = False) -> BoxOwners:
    """Find the owner of each box of a model. A critic has a value head instead of the output layer."""
    shapes: dict[str, Shape] = {}
    boxes: dict[str, dict[Box, OwnedBox]] = {}
    for rank, part in _parts_by_rank(architecture, grid, critic=critic):
        shapes[part.name] = part.shape
        boxes.setdefault(part.name, {}).setdefault(part.box, OwnedBox(part.name, part.box, rank))
    for name, shape in shapes.items():
        found = sum(box.num_values for box in boxes[name])
        assert found == math.prod(shape), f"ranks hold {found} values of {name}, whose shape is {shape}"
    return BoxOwners(shapes, {name: tuple(of_tensor.values()) for name, of_tensor in boxes.items()})


def _parts_by_rank(architecture: Architecture, grid: Grid, *, critic: bool) -> Iterator[tuple[int, Part]]:
    """Yield (rank, part) in the order of ranks. Parameters that an earlier rank also holds are skipped."""
    seen: set[tuple[int, ...]] = set()
    for rank in range(grid.ranks):
        place = grid.place(rank)
        holds = {False: (0, place.pipeline, place.tensor), True: (1, place.pipeline, place.expert, place.expert_tensor)}
        new = {is_expert for is_expert, what in holds.items() if what not in seen}
        seen |= {*holds.values()}
        if not new:
            continue
        for parameters in held_parameters(architecture, grid, place, critic=critic):
            for parameter in parameters.values():
                if parameter.is_expert in new and not parameter.is_copy:
                    yield from ((rank, part) for part in parameter.parts)


class WeightsOfRanks:
    """A `Gathers` that assembles whole tensors on the ranks that want them.

    Args:
        held: Contiguous tensors of this rank, in one dtype on all ranks.
        max_bytes: The bytes that a rank receives at a time. A larger box is received alone.
        read: A function that returns the values of a held tensor, on the host while engines have the device.
        prepare: A function that writes the values to the held tensors before each gathering. It is a collective.
    """

    def __init__(
        self,
        architecture: Architecture,
        grid: Grid,
        held: Held,
        *,
        critic: bool = False,
        max_bytes: int = IN_FLIGHT_BYTES,
        read: Callable[[Tensor], Tensor] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._read, self._prepare = read, prepare
        self._rank, self._max_bytes = dist.get_rank(), max_bytes
        self._owners = box_owners(architecture, grid, critic=critic)
        self._held = {(part.name, part.box): (tensor, part) for parameter, tensor in held for part in parameter.parts}
        kinds = {(tensor.dtype, tensor.device) for _, tensor in held}
        assert len(kinds) == 1, f"rank {self._rank} holds tensors of several kinds: {kinds}"
        [(self._dtype, self._device)] = kinds

    @property
    def names(self) -> list[str]:
        """Names of all tensors of the model."""
        return [*self._owners.shapes]

    def gather(self, wanted: Mapping[int, Collection[str]], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Implement `Gathers`. A rank also needs `max_bytes` of memory for each rank to which it sends."""
        if self._prepare is not None:
            self._prepare()
        kind = dtype or self._dtype
        whole = {
            name: torch.empty(self._owners.shapes[name], dtype=kind, device=self._device)
            for name in wanted.get(self._rank, ())
        }
        to_each = [
            [(destination, parts) for parts in self._owners.rounds(names, kind, self._max_bytes)]
            for destination, names in sorted(wanted.items())
        ]
        for rounds in zip_longest(*to_each):
            self._exchange([found for found in rounds if found is not None], kind, whole)
        return whole

    def owner_of(self, names: Collection[str]) -> int:
        return self._owners.most_of(names)

    def _exchange(
        self, wanted: Sequence[tuple[int, Sequence[OwnedBox]]], dtype: torch.dtype, whole: Mapping[str, Tensor]
    ) -> None:
        """Send boxes to the ranks that want them, in one message per owner, and put this rank's boxes into `whole`."""
        exchanges: list[dist.P2POp] = []
        arriving: list[tuple[OwnedBox, Tensor]] = []
        outgoing: dict[tuple[OwnedBox, ...], Tensor] = {}
        for destination, parts in wanted:
            for owner, group in groupby(parts, lambda part: part.owner):
                if self._rank not in (owner, destination):
                    continue
                own = [*group]
                if owner == destination:
                    for part in own:
                        _place(part, self._values(part), whole)
                    continue
                if self._rank == owner:
                    # A message is made only once, even if several ranks get it.
                    message = outgoing.get(wanted_parts := tuple(own))
                    if message is None:
                        message = outgoing[wanted_parts] = self._empty(own, dtype)
                        for part, space in zip(own, _spaces(message, own), strict=True):
                            space.copy_(self._values(part))
                    exchanges.append(dist.P2POp(dist.isend, message, destination))
                else:
                    message = self._empty(own, dtype)
                    arriving += zip(own, _spaces(message, own), strict=True)
                    exchanges.append(dist.P2POp(dist.irecv, message, owner))
        # All messages are one batch. Otherwise NCCL makes a communicator for every pair of ranks, and two ranks that
        # send to each other wait forever.
        for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
            work.wait()
        for part, values in arriving:
            _place(part, values, whole)

    def _empty(self, parts: Sequence[OwnedBox], dtype: torch.dtype) -> Tensor:
        return torch.empty(sum(part.box.num_values for part in parts), dtype=dtype, device=self._device)

    def _values(self, part: OwnedBox) -> Tensor:
        """Return the values of a box, as a view of the parameter or of its copy on the host."""
        tensor, here = self._held[part.name, part.box]
        if self._read is not None:
            tensor = self._read(tensor)
        return tensor.detach().view(-1)[here.begin : here.end]


def _spaces(message: Tensor, parts: Sequence[OwnedBox]) -> Sequence[Tensor]:
    """Return a view of the message for each box."""
    return message.split([part.box.num_values for part in parts])


def _place(part: OwnedBox, values: Tensor, whole: Mapping[str, Tensor]) -> None:
    tensor = whole[part.name]
    tensor[part.box.slices_in(Box.whole(tensor.shape))] = values.view(part.box.shape)
