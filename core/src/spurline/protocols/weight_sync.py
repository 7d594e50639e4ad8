"""Kind `weight_sync`: bring the backend's weights to the rollout engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

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


@dataclass(frozen=True)
class SyncReport:
    """version: published. bytes_sent: over the transport. transfer_s and pause_s: seconds."""

    version: int
    bytes_sent: int
    transfer_s: float
    pause_s: float


@dataclass(frozen=True)
class MakerChoice:
    """Which `BucketMaker` is to make the buckets, in whatever process the weights are: plain data.

    maker: "module:Class". settings: its arguments by name, as JSON can hold them.
    max_bytes: of the weights in a bucket; a larger tensor travels alone.
    """

    maker: str
    settings: Mapping[str, Any]
    max_bytes: int


class BucketMaker(Protocol):
    """Makes the buckets of a transport in the process where the weights are; what engines are told is elsewhere.

    Factory: `Class(**settings)`, of a `MakerChoice`. One bucket is out at a time.
    """

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        """The bucket of this number, from 1, with these weights: (hf_name, tensor), each asked for once, in order.

        Ends what the last bucket held. All weights are asked for, whatever comes; the bucket has no `tensors`.
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
