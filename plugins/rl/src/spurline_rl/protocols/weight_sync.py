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
        """Return the name of its buckets: the component's, without a plugin's prefix."""
        return self.name.rpartition("/")[2]

    @property
    def bucket_bytes(self) -> int:
        """Return the most bytes of weights in a bucket; 0 where weights are not copied."""
        return 0

    @property
    def sends_adapters(self) -> bool | None:
        """Return whether adapters are sent alone; None leaves it to the engines."""
        return None


@dataclass(frozen=True)
class SyncReport:
    """The cost of publishing a version: bytes over the transport, and seconds."""

    version: int
    bytes_sent: int
    transfer_s: float
    pause_s: float


class WeightSync(Protocol):
    """Publish weights over a transport.

    Factory: `Class(config, run=RunConfig)`.

    Attributes:
        transport: Name of the buckets it makes; every engine's `transports` must have it.
        timeout_s: Seconds that one publish may take.
        waits_for: Describes what a publish under way waits for. May be read on any thread.
    """

    transport: str
    timeout_s: float
    waits_for: str

    async def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights]) -> SyncReport:
        """Return when every engine generates with this version.

        Awaited on the engines' event loop while the thread that owns the backend waits, so that any thread may call the
        backend. Raises RunFailedError within its time limit if an engine does not take the weights; nothing that is
        generated afterwards may be trained on.
        """
        ...

    def close(self) -> None:
        """Free memory, files and connections."""
        ...
