"""Commands to an engine between requests; every layer passes them on unchanged.

Place on the way: pool -> each of its engines -> a pipe or an actor -> the engine that does them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.rollout_engine import EngineMemory, TakesWeights

UPDATE = "update"
"""The hold in which an engine gets new weights; afterwards it may generate."""
SLEEP = "sleep"
"""The hold in which the trainer has the memory of an engine's device."""


@dataclass(frozen=True)
class Command:
    """Base of all commands; `str` describes them in messages.

    Attributes:
        name: The method of `RolloutEngine` or `TakesWeights` that does it, with the command's fields as arguments.
        hold: Keeps an engine from generating, from the command that begins it to the one that ends it.
        limit: The setting of PoolConfig with the seconds that the command may take.
        words: The description, a format of the command's fields.
        begins: Whether the command begins its hold.
        ends: Whether it ends its hold.
    """

    name: ClassVar[str]
    hold: ClassVar[str]
    limit: ClassVar[str]
    words: ClassVar[str]
    begins: ClassVar[bool] = False
    ends: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.words.format_map(vars(self))

    async def apply(self, engine: Any) -> None:
        """Call the engine's method."""
        await getattr(engine, self.name)(*vars(self).values())

    def to_plain(self) -> dict[str, Any]:
        """Return the command as JSON can hold it."""
        values = {
            key: value.to_plain() if isinstance(value, WeightBucket) else value for key, value in vars(self).items()
        }
        return {"name": self.name, **values}


@dataclass(frozen=True)
class Pause(Command):
    """Stop between two tokens. When it is done, every token generated so far is in its Progress."""

    name, hold, limit, words = "pause", "pause", "pause_timeout_s", "pause"
    begins = True


@dataclass(frozen=True)
class Resume(Command):
    """Go on, unless something else holds the engine."""

    name, hold, limit, words = "resume", "pause", "pause_timeout_s", "go on"
    ends = True


@dataclass(frozen=True)
class BeginUpdate(Command):
    """Stop between two tokens for new weights; requests in flight wait."""

    version: int
    name, hold, limit, words = "begin_update", UPDATE, "update_timeout_s", "begin the update to version {version}"
    begins = True


@dataclass(frozen=True)
class BeginAdapterUpdate(Command):
    """Stop for the tensors of an adapter alone; see `TakesWeights.begin_adapter_update`."""

    version: int
    adapter: Mapping[str, Any]
    name, hold, limit = "begin_adapter_update", UPDATE, "update_timeout_s"
    words = "begin the update of its adapter to version {version}"
    begins = True


@dataclass(frozen=True)
class LoadBucket(Command):
    """Take these weights over."""

    bucket: WeightBucket
    name, hold, limit, words = "load_bucket", UPDATE, "update_timeout_s", "load weights"


@dataclass(frozen=True)
class FinishUpdate(Command):
    """Go on with the new weights, unless something else holds the engine."""

    version: int
    name, hold, limit, words = "finish_update", UPDATE, "update_timeout_s", "finish the update to version {version}"
    ends = True


@dataclass(frozen=True)
class Sleep(Command):
    """Stop between two tokens and free the memory of the device; see `MaySleep`, also for the two that follow."""

    keep_weights: bool
    name, hold, limit, words = "sleep", SLEEP, "pause_timeout_s", "sleep"
    begins = True

    async def apply(self, engine: Any) -> None:
        await engine.sleep(keep_weights=self.keep_weights)


@dataclass(frozen=True)
class WakeWeights(Command):
    """Take the memory of the weights again. An update may follow before the cache is woken."""

    name, hold, limit, words = "wake_weights", SLEEP, "pause_timeout_s", "take the memory of its weights again"

    async def apply(self, engine: Any) -> None:
        await engine.wake("weights")


@dataclass(frozen=True)
class WakeCache(Command):
    """Take the memory of keys and values again, and go on, unless something else holds the engine."""

    name, hold, limit, words = "wake_cache", SLEEP, "pause_timeout_s", "take the memory of its cache again"
    ends = True

    async def apply(self, engine: Any) -> None:
        await engine.wake("cache")


_KINDS: dict[str, type[Command]] = {kind.name: kind for kind in Command.__subclasses__()}


def from_plain(plain: Mapping[str, Any]) -> Command:
    """Return the command that `to_plain` wrote."""
    values = {
        key: WeightBucket.from_plain(value) if key == "bucket" else value
        for key, value in plain.items()
        if key != "name"
    }
    return _KINDS[plain["name"]](**values)


class ControlledEngine(TakesWeights):
    """Base of an engine that gets all commands in one method."""

    @abstractmethod
    async def control(self, command: Command) -> None:
        """Return when the command has been done. Raises as the method of its name does."""

    async def pause(self) -> None:
        await self.control(Pause())

    async def resume(self) -> None:
        await self.control(Resume())

    async def sleep(self, *, keep_weights: bool) -> None:
        await self.control(Sleep(keep_weights))

    async def wake(self, part: EngineMemory) -> None:
        await self.control(WakeWeights() if part == "weights" else WakeCache())

    async def begin_update(self, version: int) -> None:
        await self.control(BeginUpdate(version))

    async def begin_adapter_update(self, version: int, adapter: Mapping[str, Any]) -> None:
        await self.control(BeginAdapterUpdate(version, adapter))

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self.control(LoadBucket(bucket))

    async def finish_update(self, version: int) -> None:
        await self.control(FinishUpdate(version))
