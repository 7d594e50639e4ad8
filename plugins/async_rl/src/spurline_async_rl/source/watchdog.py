"""Who waits for which engine since when: what a watchdog can say when nothing moves.

Place on the way: policy handle -> this -> rollout engine. It passes everything through and remembers when it was asked.

Wait for rollouts, and say who holds what when nothing moves for too long.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console

from spurline.errors import RunFailedError
from spurline.protocols.rollout_engine import (
    GenerationRequest,
    GenerationResult,
    MayBeDown,
    RolloutEngine,
    TakesWeights,
)
from spurline_async_rl.scheduling.scheduler import Scheduler
from spurline_async_rl.source.loop_thread import LoopThread

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
        # The rest goes straight to the engine.
        self.pause, self.resume, self.close = engine.pause, engine.resume, engine.close

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
        holder = self._engine.holder_of(name) if isinstance(self._engine, TakesWeights) else "the engine"
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


T = TypeVar("T")


class Watchdog:
    """Of one wait of the training thread. `source.watchdog_s` after the last movement it prints to stderr what holds
    the run up, again and again, and after `source.stall_timeout_s` it ends the run.

    describe: from seconds without movement, what is under way. moved_at: when a request was last answered, on the
    monotonic clock; what has not ended yet may move all the same.
    """

    def __init__(
        self,
        watchdog_s: float,
        stall_timeout_s: float,
        loop: LoopThread,
        describe: Callable[[float], str],
        moved_at: Callable[[], float],
    ) -> None:
        self._watchdog_s = watchdog_s
        self._stall_timeout_s = stall_timeout_s
        self._loop = loop
        self._describe = describe
        self._last_answer = moved_at
        self._moved_at = self._told_at = time.monotonic()

    def wait(self, changed: threading.Event) -> None:
        """Return when something changed, or after having told that nothing did."""
        if changed.wait(self._patience()):
            self._moved_at = self._told_at = time.monotonic()
        elif (answered_at := self._last_answer()) > self._moved_at:
            self._moved_at = self._told_at = answered_at
        else:
            self._tell(self._describe)

    def result(self, future: concurrent.futures.Future[T]) -> T:
        """The result of a call on the event loop, which takes long only when the loop is blocked."""
        while True:
            try:
                return future.result(self._patience())
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                self._tell(self._blocked)

    def _patience(self) -> float:
        return max(0.0, self._watchdog_s - (time.monotonic() - self._told_at))

    def _tell(self, describe: Callable[[float], str]) -> None:
        self._told_at = time.monotonic()
        waited_s = self._told_at - self._moved_at
        text = describe(waited_s)
        if waited_s >= self._stall_timeout_s:
            raise RunFailedError(
                f"{text}\nThe run ends, as source.stall_timeout_s is {self._stall_timeout_s:g}. The same command goes "
                "on from the last checkpoint, which holds the groups that were finished by then."
            )
        tell(text)

    def _blocked(self, waited_s: float) -> str:
        return (
            f"Nothing moves for {waited_s:.0f} s, and training waits for rollouts: an environment or reward blocks "
            "the event loop they all run on. Move what takes long into spurline.rl.concurrency.in_thread.\n"
            f"{self._loop.position()}"
        )


def tell(text: str) -> None:
    """Print what holds a run up."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
