"""A maker of buckets that returns its inputs, for tests of which rank makes which bucket of which weights."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spurline_async_rl.weights.buckets import bucket_bytes
from spurline_models.weight_buckets import MakerChoice, TensorPlace, WeightBucket

MAKER = f"{__name__}:RecordingMaker"


class RecordingMaker:
    """A `BucketMaker` of a process. folder: where it notes its calls in a file, if given."""

    def __init__(self, folder: str | None = None, sender: int | None = None, senders: int | None = None) -> None:
        self._folder, self._sender, self._senders = folder, sender, senders
        self._note("made")

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        self._note(f"{version}-{number}")
        held = list(weights)
        places = tuple(TensorPlace.of(name, tensor) for name, tensor in held)
        mine = {"values": {name: _text(tensor) for name, tensor in held}, "process": os.getpid()}
        where = {"copies": {str(self._sender): mine}, "senders": self._senders, "number": number}
        return WeightBucket("recording", places, where)

    def taken(self) -> None:
        self._note("taken")

    def close(self) -> None:
        self._note("closed")

    def _note(self, what: str) -> None:
        if self._folder is not None:
            with open(os.path.join(self._folder, f"{self._sender}-{os.getpid()}"), "a") as file:
                file.write(f"{what}\n")


@dataclass(frozen=True)
class Recorded:
    """The result of a publish.

    weights: by name. senders: of each bucket, in order: the numbers of those that made it, with "None" where they were
    told none. sizes: bytes of the weights of each bucket. processes: ids of those that made any. told: the numbers of
    senders that makers were told.
    """

    weights: dict[str, Tensor]
    senders: list[list[str]]
    sizes: list[int]
    numbers: list[int]
    processes: set[int]
    told: set[int | None]


def choice_of(max_bytes: int = 20_000, *, folder: object = None, **settings: Any) -> MakerChoice:
    """Return a choice of this maker. settings: of the choice."""
    return MakerChoice(MAKER, {"folder": None if folder is None else str(folder)}, max_bytes, **settings)


def record(buckets: Iterator[WeightBucket]) -> Recorded:
    """Take all buckets. Asserts that copies are equal bit for bit, and that every weight comes once."""
    recorded = Recorded({}, [], [], [], set(), set())
    for bucket in buckets:
        copies: Mapping[str, Mapping[str, Any]] = bucket.where["copies"]
        first, *others = copies.values()
        assert all(other["values"] == first["values"] for other in others)
        for place in bucket.places:
            assert place.name not in recorded.weights, place.name
            recorded.weights[place.name] = _tensor(first["values"][place.name], place)
        recorded.senders.append([*copies])
        recorded.sizes.append(bucket_bytes(bucket.places))
        recorded.numbers.append(bucket.where["number"])
        recorded.processes.update(copy["process"] for copy in copies.values())
        recorded.told.add(bucket.where["senders"])
    return recorded


def _text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).decode()


def _tensor(text: str, place: TensorPlace) -> Tensor:
    values = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=getattr(torch, place.dtype))
    return values.view(place.shape)


class PackingMaker:
    """A `BucketMaker` that copies weights into one tensor, and keeps it until the next is made."""

    def __init__(self, sender: int = 0, senders: int = 1) -> None:
        self._packed: Tensor | None = None

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        # A maker that overlaps sends the last bucket until the next one is gathered.
        self._packed = None
        held = list(weights)
        self._packed = torch.cat([tensor.reshape(-1) for _, tensor in held])
        return WeightBucket("packing", tuple(TensorPlace.of(name, tensor) for name, tensor in held))

    def taken(self) -> None:
        self._packed = None

    def close(self) -> None:
        self._packed = None
