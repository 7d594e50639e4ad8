"""Kind `weight_sync`: bring the backend's weights to the rollout engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from torch import Tensor

    from spurline.protocols.backend import Backend
    from spurline.protocols.rollout_engine import TakesWeights, WeightBucket


class WeightSyncConfig(ComponentConfig):
    """Settings of a weight sync."""

    kind: ClassVar[str] = "weight_sync"
    needs_gpu: ClassVar[bool] = False
    """Whether it works between GPUs only, so that it is not chosen by default where there is none."""

    @property
    def transport(self) -> str:
        """Name of the buckets it makes, without the plugin that a name may begin with."""
        return self.name.rpartition("/")[2]

    @property
    def bucket_bytes(self) -> int:
        """Bytes of weights in a bucket at most; 0 where they stay where they are."""
        return 0

    @property
    def sends_adapters(self) -> bool | None:
        """Whether adapters are to be sent alone; None leaves it to what engines can take."""
        return None


@dataclass(frozen=True)
class SyncReport:
    """version: published. bytes_sent: over the transport. transfer_s and pause_s: seconds."""

    version: int
    bytes_sent: int
    transfer_s: float
    pause_s: float


PublishedPart = Literal["model", "adapter"]
"""What engines are sent."""


@dataclass(frozen=True)
class MakerChoice:
    """Which `BucketMaker` is to make the buckets, in whatever process the weights are: plain data.

    maker: "module:Class". settings: its arguments by name, as JSON can hold them.
    max_bytes: of the weights in a bucket; a larger tensor travels alone.
    dtype: what weights of floating point are cast to, as torch writes it without `torch.`; None: that of the backend.
    part: the whole model with adapters merged into it, or the tensors of its adapters alone.
    made_by: of several processes with weights, the one that makes a bucket: the `first`; the one among its `owners`
    that has most of it already; or `all`, each a copy of its own, whose `where` are joined into one. Unless it is
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
        """The bucket of this number, from 1, with these weights: (hf_name, tensor), each asked for once, in order.

        Ends what the last bucket held. All weights are asked for, whatever comes; the bucket has no `tensors`. The same
        number comes again when engines did not get the bucket.
        """
        ...

    def taken(self) -> None:
        """Every engine has taken the last bucket over, so that what it held may go. May be called again."""
        ...

    def close(self) -> None:
        """Free memory and files."""
        ...


class WeightSync(Protocol):
    """Publish weights; the transport decides who sends to whom.

    Factory: `Class(config, run=RunConfig)`.

    transport: name of the buckets it makes; every engine's `transports` must have it.
    timeout_s: seconds that one publish may take.
    waits_for: what a publish under way waits for, in words. May be read on any thread.
    """

    transport: str
    timeout_s: float
    waits_for: str

    async def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights]) -> SyncReport:
        """Return when every engine generates with this version.

        Awaited on the engines' event loop while the thread that owns the backend waits, so that the backend may be
        called from here, on whatever thread. Raises RunFailedError within its time limit, saying what it waited for,
        when any engine does not take the weights; nothing may be trained on what is generated afterwards.
        """
        ...

    def close(self) -> None:
        """Free memory, files and connections."""
        ...
