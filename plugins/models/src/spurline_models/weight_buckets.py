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
        transport: The way they take, such as `shared_memory`; says how to read `where`.
        places: The tensors in it.
        where: JSON values, such as `{"path": "..."}`.
        tensors: The tensors themselves, in the order of `places`, for transports within this process; else empty.
        machine: The machine whose processes alone can read it, as `spurline_models.machine.this_machine` names it;
            empty if others can too.
        receiver: The one of an engine's `receivers` that reads this copy of the description; set on the way to it.
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
    """The choice of a `BucketMaker`, as plain data for the processes where the weights are.

    Attributes:
        maker: The maker as "module:Class".
        settings: Its arguments by name, as JSON can hold them.
        max_bytes: Size of the weights in a bucket; a larger tensor travels alone.
        dtype: Dtype that weights of floating point are cast to, as torch writes it without `torch.`; None for that of
            the backend.
        part: The whole model with adapters merged into it, or the tensors of its adapters alone.
        made_by: The process, of several with weights, that makes a bucket: the `first`; the one among its `owners` that
            has most of it already; or `all`, each a copy of its own, whose `where` are joined into one. Unless it is
            `first`, makers get two arguments more: `sender`, their number, and `senders`, how many there are.
    """

    maker: str
    settings: Mapping[str, Any]
    max_bytes: int
    dtype: str | None = None
    part: PublishedPart = "model"
    made_by: Literal["first", "owners", "all"] = "first"


class BucketMaker(Protocol):
    """Makes the buckets of a transport in the process where the weights are; what engines are told is elsewhere.

    Factory: `Class(**settings)`, of a `MakerChoice`. One bucket is out at a time, or being made while engines take the
    last one over, where its `WeightSync` asks for that.
    """

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        """Make the bucket of this number, from 1, with these weights: (hf_name, tensor), each taken once, in order.

        Frees what the last bucket held. All weights must be taken, also after an error; the bucket has no `tensors`.
        The same number comes again when engines did not get the bucket.
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
    """A backend whose weights are in other processes, and are made into buckets there, so that they never come here."""

    def weight_buckets(self, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
        """Yield all weights, as `named_weights` has them, in buckets that a maker of this choice makes where they are.

        The next bucket is asked for when every engine has taken the last one over, or before, where the maker can. The
        maker is kept, with what it holds, until another choice is made or the backend is closed; its memory and files
        go with its process. `first` is the number of the first bucket, from 1; those before have been taken over.
        """
        ...
