"""Sizes of rollouts that their sources tell and plans of memory read. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


@dataclass(frozen=True)
class LargestUpdate:
    """The largest optimizer step: the tokens of its longest row, and of all its rows."""

    row_length: int
    tokens: int


class ColocatedSettings(Protocol):
    """Settings of an engine that has the devices of the backend by turns with it."""

    takes_less: ClassVar[str]
    """Sentences on the settings that leave a trainer more of the device."""

    @property
    def offloads_trainer(self) -> bool:
        """True if the trainer's weights leave the device while the engine generates."""
        ...

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> Mapping[Literal["weights", "cache"], int]:
        """Return the bytes on the fullest device of what the engine wakes there; {} if that is not known.

        Args:
            run: The run that it generates for.
            responses: Responses that it writes together.
            length: Tokens of each, prompt included.
            device_bytes: Memory of the device.
        """
        ...


@dataclass(frozen=True)
class ColocatedEngine:
    """An engine that has the devices of the backend by turns with it, and what is asked of it.

    Attributes:
        config: Its settings.
        responses: Responses that it writes together.
        length: Tokens of each, prompt included.
        bucket_bytes: Bytes of the weights that are on their way at a time.
    """

    config: ColocatedSettings
    responses: int
    length: int
    bucket_bytes: int
