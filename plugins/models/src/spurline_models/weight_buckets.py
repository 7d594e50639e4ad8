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
        dtype: Dtype as torch writes it, without `torch.`: `float32`.
        shape: Shape of the tensor.
        offset: Bytes from the beginning of the bucket's memory or file; 0 where the transport has neither.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, name: str, tensor: Tensor, offset: int = 0) -> TensorPlace:
        """Return the place of this tensor."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


@dataclass(frozen=True)
class WeightBucket:
    """Some of a model's weights on their way to an engine; a tensor is never divided between buckets.

    Attributes:
        transport: How the weights travel, such as `shared_memory`; this decides the content of `where`.
        places: The tensors in the bucket.
        where: JSON values that say where the memory or file is, such as `{"path": "..."}`.
        tensors: The tensors themselves, in the order of `places`, for transports within this process; else empty.
        machine: Name of the only machine whose processes can read the bucket, from
            `spurline_models.machine.this_machine`; empty if others can too.
        receiver: The one of an engine's `receivers` that reads this copy of the description; set when it is sent.
    """

    transport: str
    places: tuple[TensorPlace, ...]
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tensors: tuple[Tensor, ...] = ()
    machine: str = ""
    receiver: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return the bucket as JSON can hold it; tensors of a transport within one process do not travel."""
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
    """A `BucketMaker` and its settings, as plain data that is sent to the processes that hold the weights.

    Attributes:
        maker: The maker as "module:Class".
        settings: Its arguments by name, as JSON can hold them.
        max_bytes: Size of the weights in a bucket; a larger tensor travels alone.
        dtype: Dtype that weights of floating point are cast to, as torch writes it without `torch.`; None for that of
            the backend.
        part: The whole model with adapters merged into it, or the tensors of its adapters alone.
        made_by: Which of the processes with weights make a bucket. With `first`, the first process makes all of them.
            With `owners`, the process that already holds most of a bucket makes it. With `all`, each makes a copy, and
            their `where` are joined into one. Unless this is `first`, a maker also gets the arguments `sender`, its
            number, and `senders`, the number of makers.
    """

    maker: str
    settings: Mapping[str, Any]
    max_bytes: int
    dtype: str | None = None
    part: PublishedPart = "model"
    made_by: Literal["first", "owners", "all"] = "first"


class BucketMaker(Protocol):
    """Makes the buckets of a transport in a process that holds weights; the transport's `WeightSync` tells engines.

    Factory: `Class(**settings)`, with the settings of a `MakerChoice`. A bucket is made after engines have taken the
    last one over, or meanwhile if the `WeightSync` makes buckets ahead.
    """

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        """Make the bucket of this number, from 1, with these weights: (hf_name, tensor), each taken once, in order.

        Frees what the last bucket held. All weights must be taken, even after an error; the bucket has no `tensors`.
        The same number is asked for again if engines did not get the bucket.
        """
        ...

    def taken(self) -> None:
        """Free what the last bucket held, since every engine has taken it over. May be called again."""
        ...

    def close(self) -> None:
        """Free memory and files."""
        ...


@runtime_checkable
class MakesBuckets(Protocol):
    """A backend that holds its weights in other processes and makes buckets there, so that no weights come here."""

    def weight_buckets(self, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
        """Yield all weights of `named_weights` in buckets, which makers of this choice make in the weights' processes.

        The caller asks for the next bucket when every engine has taken the last one over, or earlier if the maker can
        work ahead. The maker is kept, with what it holds, until another choice is made or the backend is closed; its
        memory and files end with its process.

        Args:
            version: Version of the weights.
            choice: The maker to use.
            first: Number of the first bucket, from 1; engines have taken the ones before over.
        """
        ...
