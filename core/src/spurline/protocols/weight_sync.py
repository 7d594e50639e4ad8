"""Kind `weight_sync`: bring the backend's weights to the rollout engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from spurline.protocols.backend import Backend
    from spurline.protocols.rollout_engine import RolloutEngine


@dataclass(frozen=True)
class SyncReport:
    """version: published. bytes_sent: over the transport. transfer_s and pause_s: seconds."""

    version: int
    bytes_sent: int
    transfer_s: float
    pause_s: float


class WeightSync(Protocol):
    """Publish weights; the transport decides who sends to whom.

    Factory: `Class(config)`.
    """

    def publish(self, version: int, backend: Backend, engines: Sequence[RolloutEngine]) -> SyncReport:
        """Return when every engine generates with this version. Raises RunFailedError when any does not."""
        ...
