"""Who waits for which engine since when: what a watchdog can say when nothing moves.

Place on the way: policy handle -> this -> rollout engine. It passes everything through and remembers when it was asked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from spurline.protocols.rollout_engine import GenerationRequest, GenerationResult, MayBeDown, RolloutEngine
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.scheduling.scheduler import Scheduler

_SHOWN = 8


@dataclass(frozen=True)
class _Asked:
    request: GenerationRequest
    at: float


class ObservedEngine:
    """A rollout engine whose requests under way can be listed. engine: the one that generates."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._under_way: dict[int, _Asked] = {}
        self._next = 0
        self.answered_at = 0.0
        """When a request was last answered, on the monotonic clock."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        number = self._next
        self._next += 1
        self._under_way[number] = _Asked(request, time.monotonic())
        try:
            return await self._engine.generate(request)
        finally:
            del self._under_way[number]
            self.answered_at = time.monotonic()

    def seconds_down(self) -> float:
        return self._engine.seconds_down() if isinstance(self._engine, MayBeDown) else 0.0

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def close(self) -> None:
        await self._engine.close()

    def describe(self) -> list[str]:
        """A line for each request, the oldest first: its name, how long it has taken, and which engine has it."""
        now = time.monotonic()
        asked = sorted(self._under_way.values(), key=lambda item: item.at)
        lines = [
            f"{item.request.name}: asked {now - item.at:.0f} s ago, {self._holder(item.request.name)}"
            for item in asked[:_SHOWN]
        ]
        if len(asked) > _SHOWN:
            lines.append(f"and {len(asked) - _SHOWN} requests more")
        return lines

    def _holder(self, name: str) -> str:
        if not isinstance(self._engine, EnginePool):
            return "with the engine"
        holder = self._engine.holder_of(name)
        return f"with {holder}" if holder else "waiting for an engine"


def stall_report(
    scheduler: Scheduler, since: dict[str, float], engine: ObservedEngine, waited_s: float, step: int
) -> str:
    """Why the loop still waits for the batch of this step.

    since: when each group under way began, by uid, on the monotonic clock.
    """
    now = time.monotonic()
    limits = scheduler.limits
    lines = [
        f"No group has ended for {waited_s:.0f} s, and no request was answered. "
        f"Step {step} waits for {limits.batch_size} groups: "
        f"{scheduler.num_buffered} are finished, {scheduler.num_running} under way (order: {limits.order}, "
        f"max_staleness: {limits.max_staleness}, weights of version {scheduler.version})."
    ]
    oldest = sorted(since.items(), key=lambda item: item[1])
    lines += [f"  group {uid}: under way for {now - began:.0f} s" for uid, began in oldest[:_SHOWN]]
    if len(oldest) > _SHOWN:
        lines.append(f"  and {len(oldest) - _SHOWN} groups more")
    requests = engine.describe()
    if requests:
        lines += [f"  {line}" for line in requests]
    elif oldest:
        lines.append("  no request is with an engine: the environments or rewards of these groups have not returned")
    return "\n".join(lines)


def held_out_report(engine: ObservedEngine, waited_s: float) -> str:
    """Why the loop still waits for an evaluation."""
    head = f"The evaluation waits for held-out attempts; no request was answered for {waited_s:.0f} s."
    return "\n".join([head, *(f"  {line}" for line in engine.describe())])
