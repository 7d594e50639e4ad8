"""What rollouts ask of devices: sources of rollouts say it, and plans of memory read it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from typing import Self

    from spurline.config.run_config import RunConfig


@dataclass(frozen=True)
class LargestUpdate:
    """The most that one optimizer step may hold. row_length: tokens of its longest row. tokens: of all its rows."""

    row_length: int
    tokens: int


class ColocatedSettings(Protocol):
    """Settings of an engine that has the devices of the backend by turns with it.

    responses: that it writes together. length: tokens of each, prompt included. device_bytes: memory of the device.
    """

    @property
    def offloads_trainer(self) -> bool:
        """Whether the trainer's weights leave the device while the engine generates."""
        ...

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> Mapping[Literal["weights", "cache"], int]:
        """Return the bytes on the fullest device of what the engine wakes there; {} where it is not known."""
        ...

    def colocated_savings(
        self, run: RunConfig, responses: int, length: int, device_bytes: int, beside: int, alone: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return changes of these settings that leave a trainer more of the device, each tried alone.

        beside, alone: bytes that the engine may take beside the weights that the trainer leaves there, and where these
        leave too.
        """
        ...

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """Return these settings with other values."""
        ...


@dataclass(frozen=True)
class ColocatedEngine:
    """An engine that has the devices of the backend by turns with it, and what is asked of it.

    config: its settings. key: where these are in the config file. responses, length: as in `ColocatedSettings`.
    bucket_bytes: of weights that are on their way at a time.
    """

    config: ColocatedSettings
    key: str
    responses: int
    length: int
    bucket_bytes: int
