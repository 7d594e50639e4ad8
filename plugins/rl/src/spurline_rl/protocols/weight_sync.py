"""Kind `weight_sync`: bring the backend's weights to the rollout engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from spurline.protocols.backend import Backend
    from spurline_rl.protocols.rollout_engine import TakesWeights


class WeightSyncConfig(ComponentConfig):
    """Settings of a weight sync."""

    kind: ClassVar[str] = "weight_sync"
    needs_gpu: ClassVar[bool] = False
    """If true, it works between GPUs only, so that it is not chosen by default where there is none."""

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
        """Return whether adapters are to be sent alone; None leaves it to what engines can take."""
        return None


@dataclass(frozen=True)
class SyncReport:
    """version: published. bytes_sent: over the transport. transfer_s and pause_s: seconds."""

    version: int
    bytes_sent: int
    transfer_s: float
    pause_s: float


class WeightSync(Protocol):
    """Publish weights; the transport decides who sends to whom.

    Factory: `Class(config, run=RunConfig)`.

    Attributes:
        transport: Name of the buckets it makes; every engine's `transports` must have it.
        timeout_s: Seconds that one publish may take.
        waits_for: What a publish under way waits for, in words. May be read on any thread.
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
