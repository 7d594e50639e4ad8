"""Define the commands to an engine. Each layer, from the pool to the engine, passes them on."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.rollout_engine import EngineMemory, TakesWeights

PAUSE, UPDATE, SLEEP = "pause", "update", "sleep"
"""The kinds of holds. A hold is a time without generation: the engine is paused, its weights are updated, or it sleeps
while the trainer uses the memory of its device."""


@dataclass(frozen=True)
class Command:
    """Base of all commands.

    Attributes:
        name: Name of the method of `RolloutEngine`, `TakesWeights` or `MaySleep` that carries out the command. The
            method's docstring explains the command. The fields of the command are the method's arguments.
        hold: The hold that the command belongs to.
        begins: Whether the hold begins with this command.
    """

    name: ClassVar[str]
    hold: ClassVar[str]
    begins: ClassVar[bool] = False

    @property
    def ends(self) -> bool:
        """Return whether the hold ends with this command. If no other hold is left, the engine generates again."""
        return self.name in ("resume", "finish_update")

    @property
    def limit(self) -> str:
        """Return the name of the setting that limits the time of the command."""
        return "update_timeout_s" if self.hold == UPDATE else "pause_timeout_s"

    def __str__(self) -> str:
        return self.name.replace("_", " ")

    async def apply(self, engine: Any) -> None:
        await getattr(engine, self.name)(**vars(self))

    def to_plain(self) -> dict[str, Any]:
        """Return the command as plain values for JSON."""
        values = {
            key: value.to_plain() if isinstance(value, WeightBucket) else value for key, value in vars(self).items()
        }
        return {"name": self.name, **values}


@dataclass(frozen=True)
class Pause(Command):
    name, hold, begins = "pause", PAUSE, True


@dataclass(frozen=True)
class Resume(Command):
    name, hold = "resume", PAUSE


@dataclass(frozen=True)
class BeginUpdate(Command):
    version: int
    name, hold, begins = "begin_update", UPDATE, True


@dataclass(frozen=True)
class BeginAdapterUpdate(Command):
    version: int
    adapter: Mapping[str, Any]
    name, hold, begins = "begin_adapter_update", UPDATE, True


@dataclass(frozen=True)
class LoadBucket(Command):
    bucket: WeightBucket
    name, hold = "load_bucket", UPDATE


@dataclass(frozen=True)
class FinishUpdate(Command):
    version: int
    name, hold = "finish_update", UPDATE


@dataclass(frozen=True)
class Sleep(Command):
    keep_weights: bool
    name, hold, begins = "sleep", SLEEP, True


@dataclass(frozen=True)
class Wake(Command):
    part: EngineMemory
    name, hold = "wake", SLEEP

    @property
    def ends(self) -> bool:
        return self.part == "cache"


_KINDS: dict[str, type[Command]] = {kind.name: kind for kind in Command.__subclasses__()}


def from_plain(plain: Mapping[str, Any]) -> Command:
    """Return the command that `to_plain` wrote."""
    values = {key: value for key, value in plain.items() if key != "name"}
    if "bucket" in values:
        values["bucket"] = WeightBucket.from_plain(values["bucket"])
    return _KINDS[plain["name"]](**values)


class Gate:
    """A gate that requests can pass while no hold has shut it."""

    def __init__(self) -> None:
        self.holds: set[str] = set()
        self._opened = asyncio.Event()

    def shut(self, hold: str) -> None:
        self.holds.add(hold)
        self._opened.clear()

    def open(self, hold: str) -> None:
        self.holds.discard(hold)
        if not self.holds:
            self._opened.set()

    async def wait(self) -> None:
        while self.holds:
            await self._opened.wait()


class ControlledEngine(TakesWeights):
    """Base of engines that carry out all commands in one method, `control`."""

    @abstractmethod
    async def control(self, command: Command) -> None:
        """Carry out the command. Raises the same errors as the method with the command's name."""

    async def pause(self) -> None:
        await self.control(Pause())

    async def resume(self) -> None:
        await self.control(Resume())

    async def sleep(self, *, keep_weights: bool) -> None:
        await self.control(Sleep(keep_weights))

    async def wake(self, part: EngineMemory) -> None:
        await self.control(Wake(part))

    async def begin_update(self, version: int) -> None:
        await self.control(BeginUpdate(version))

    async def begin_adapter_update(self, version: int, adapter: Mapping[str, Any]) -> None:
        await self.control(BeginAdapterUpdate(version, adapter))

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self.control(LoadBucket(bucket))

    async def finish_update(self, version: int) -> None:
        await self.control(FinishUpdate(version))
