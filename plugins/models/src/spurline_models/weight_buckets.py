"""Types for sending a backend's weights to engines in buckets. Processes that hold weights make the buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorPlace:
    """The name, dtype and shape of a tensor in a bucket, and where it begins.

    Attributes:
        name: Hugging Face name of the weight.
        dtype: Dtype such as `float32`.
        shape: Shape of the tensor.
        offset: Where the tensor begins in the bucket's memory or file, in bytes.
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
    """A group of weights that is sent to an engine together. A tensor is never divided between buckets.

    Attributes:
        transport: The kind of transport, such as `shared_memory`.
        places: The tensors in the bucket.
        where: JSON values that name the memory or file. Their content depends on the transport.
        tensors: The tensors, in the order of `places`, if the bucket stays in this process.
        machine: The result of `this_machine` if only that machine can read the bucket, else an empty string.
        receiver: The engine that reads this copy, as named in the engines' `receivers`. Set when the bucket is sent.
    """

    transport: str
    places: tuple[TensorPlace, ...]
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tensors: tuple[Tensor, ...] = ()
    machine: str = ""
    receiver: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return the bucket as JSON values, without `tensors`."""
        return asdict(replace(self, tensors=()))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> WeightBucket:
        """Make a bucket from the result of `to_plain`."""
        places = tuple(TensorPlace(**{**place, "shape": tuple(place["shape"])}) for place in plain["places"])
        return cls(**{**plain, "places": places, "tensors": ()})


PublishedPart = Literal["model", "adapter"]
"""The part of the weights that is sent to engines."""


@dataclass(frozen=True)
class MakerChoice:
    """A `BucketMaker` and its settings, as plain data that is sent to the processes with the weights.

    Attributes:
        maker: The maker as "module:Class".
        settings: The maker's arguments by name, as JSON values.
        max_bytes: Maximum size of a bucket in bytes. A larger tensor gets its own bucket.
        dtype: The dtype of floating point weights, such as `bfloat16`. None keeps the backend's dtype.
        part: The whole model with merged adapters, or only the adapters.
        made_by: The processes that make a bucket. With `first`, the first process makes all buckets. With `owners`, the
            process that holds most of a bucket makes it. With `all`, every process makes a copy of the bucket, and the
            `where` mappings of all copies are joined. With `owners` or `all`, a maker gets two more arguments:
            `senders`, the number of processes that make buckets, and `sender`, the index of its own process.
    """

    maker: str
    settings: Mapping[str, Any]
    max_bytes: int
    dtype: str | None = None
    part: PublishedPart = "model"
    made_by: Literal["first", "owners", "all"] = "first"


class BucketMaker(Protocol):
    """A maker of a transport's buckets in a process with weights. The `WeightSync` tells engines about the buckets.

    Factory: `Class(**settings)`, with the settings of a `MakerChoice`. A bucket is made when engines have taken the
    previous one, or earlier if the `WeightSync` makes buckets ahead.
    """

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        """Free the previous bucket, and make bucket `number`, counted from 1. The new bucket has no `tensors`.

        `weights` are pairs (hf_name, tensor). The maker must iterate over all pairs once, even after an error. If
        engines did not get the bucket, `make` is called again with the same number.
        """
        ...

    def taken(self) -> None:
        """Free the last bucket, since every engine has taken it. This may be called several times."""
        ...

    def close(self) -> None:
        """Free memory and files."""
        ...


@runtime_checkable
class MakesBuckets(Protocol):
    """A backend that holds its weights in other processes and makes buckets there."""

    def weight_buckets(self, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
        """Yield all weights of the backend's `named_weights`, in buckets.

        The caller asks for the next bucket when every engine has taken the previous one, or earlier if the maker can
        work ahead. The maker is kept until this is called with another choice, or the backend is closed.

        Args:
            version: Version of the weights.
            choice: The maker to use.
            first: Number of the first bucket to make, counted from 1. Engines already have the earlier buckets.
        """
        ...
