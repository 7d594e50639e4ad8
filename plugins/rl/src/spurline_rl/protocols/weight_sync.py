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
    """If true, the sync works only between GPUs, and is not the default on machines without a GPU."""

    @property
    def transport(self) -> str:
        """Return the name of the transport, which is the component's name without a plugin's prefix."""
        return self.name.rpartition("/")[2]

    @property
    def bucket_bytes(self) -> int:
        """Return the largest number of bytes in a bucket; 0 if weights are not copied."""
        return 0

    @property
    def sends_adapters(self) -> bool | None:
        """Return whether adapters are sent without the model's weights; None if the engines decide."""
        return None


@dataclass(frozen=True)
class SyncReport:
    """The cost of publishing a version of the weights."""

    version: int
    bytes_sent: int
    transfer_s: float
    pause_s: float


class WeightSync(Protocol):
    """Publish weights over a transport.

    Factory: `Class(config, run=RunConfig)`.

    Attributes:
        transport: Name of the transport. Every engine must have it among its `transports`.
        timeout_s: Seconds that one publish may take.
        waits_for: Text that says what a publish waits for. May be read on any thread.
    """

    transport: str
    timeout_s: float
    waits_for: str

    async def publish(self, version: int, backend: Backend, engines: Sequence[TakesWeights]) -> SyncReport:
        """Publish the backend's weights, and return when every engine generates with this version.

        It is awaited on the engines' event loop. The thread that owns the backend waits meanwhile, so any thread may
        call the backend.

        Raises:
            RunFailedError: If an engine does not take the weights in time. Do not train on tokens generated after that.
        """
        ...

    def close(self) -> None:
        """Free memory, files and connections."""
        ...
