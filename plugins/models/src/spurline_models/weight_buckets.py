"""Send weights out of a backend in buckets, which are made where the weights are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorPlace:
    """A tensor within what a transport carries.

    Attributes:
        name: Hugging Face name of the weight.
        dtype: Dtype such as `float32`.
        shape: Shape of the tensor.
        offset: Bytes from the beginning of the bucket's memory or file, if the transport has either.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, name: str, tensor: Tensor, offset: int = 0) -> TensorPlace:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


@dataclass(frozen=True)
class WeightBucket:
    """Some of a model's weights on their way to an engine; a tensor is never divided between buckets.

    Attributes:
        transport: The kind of transport, such as `shared_memory`, which decides the content of `where`.
        places: The tensors in the bucket.
        where: JSON values that name the memory or file.
        tensors: The tensors, in the order of `places`, if the transport stays in this process.
        machine: `this_machine` of the only machine that can read the bucket; empty if others can too.
        receiver: Which of an engine's `receivers` reads this copy; set when the bucket is sent.
    """

    transport: str
    places: tuple[TensorPlace, ...]
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tensors: tuple[Tensor, ...] = ()
    machine: str = ""
    receiver: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return the bucket as JSON can hold it, without `tensors`."""
        places = [[place.name, place.dtype, list(place.shape), place.offset] for place in self.places]
        return {
            "transport": self.transport,
            "places": places,
            "where": dict(self.where),
            "machine": self.machine,
            "receiver": self.receiver,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> WeightBucket:
        """Read the bucket that `to_plain` wrote."""
        places = tuple(TensorPlace(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in plain["places"])
        return cls(plain["transport"], places, plain["where"], machine=plain["machine"], receiver=plain["receiver"])


PublishedPart = Literal["model", "adapter"]
"""The part of the weights that engines are sent."""


@dataclass(frozen=True)
class MakerChoice:
    """A `BucketMaker` and its settings, as plain data for the processes that hold the weights.

    Attributes:
        maker: The maker as "module:Class".
        settings: Its arguments by name, as JSON can hold them.
        max_bytes: Size of the weights in a bucket; a larger tensor travels alone.
        dtype: Dtype that floating point weights are cast to, such as `bfloat16`; None for the backend's own.
        part: The whole model with adapters merged into it, or the adapters alone.
        made_by: The processes that make a bucket. `first`: the first process makes all buckets. `owners`: the process
            that holds most of a bucket makes it. `all`: each makes a copy, and the `where` of all copies are joined.
            Unless this is `first`, a maker also gets the arguments `sender`, its number, and `senders`, their count.
    """

    maker: str
    settings: Mapping[str, Any]
    max_bytes: int
    dtype: str | None = None
    part: PublishedPart = "model"
    made_by: Literal["first", "owners", "all"] = "first"


class BucketMaker(Protocol):
    """Makes the buckets of a transport in a process that holds weights; the transport's `WeightSync` tells engines.

    Factory: `Class(**settings)`, with the settings of a `MakerChoice`. A bucket is made when engines have taken the
    last one, or earlier if the `WeightSync` makes buckets ahead.
    """

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        """Free the last bucket, and make the bucket of this number, from 1, without `tensors`.

        All weights (hf_name, tensor) must be taken once and in order, even after an error. The same number is asked for
        again if engines did not get the bucket.
        """
        ...

    def taken(self) -> None:
        """Free the last bucket, which every engine has taken. May be called again."""
        ...

    def close(self) -> None:
        """Free memory and files."""
        ...


@runtime_checkable
class MakesBuckets(Protocol):
    """A backend that holds its weights in other processes and makes buckets there."""

    def weight_buckets(self, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
        """Yield all weights of `named_weights` in buckets.

        The caller asks for the next bucket when every engine has taken the last one, or earlier if the maker can work
        ahead. The maker is kept until another choice is made or the backend is closed; its memory and files end with
        its process.

        Args:
            version: Version of the weights.
            choice: The maker to use.
            first: Number of the first bucket, from 1; engines have the ones before.
        """
        ...
