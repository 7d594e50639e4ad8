"""Wait for rollouts, and report the cause if there is no progress for too long."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from spurline.errors import RunFailedError
from spurline.terminal import tell
from spurline_async_rl.proof.proof import PublishProof
from spurline_async_rl.source.configs import AsyncRolloutsConfig
from spurline_async_rl.source.loop_thread import LoopThread
from spurline_async_rl.source.producer import Producer
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, RolloutEngine, TakesWeights

T = TypeVar("T")

_SHOWN = 8


class ObservedEngine:
    """A wrapper of a rollout engine that remembers its unfinished requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[str, float]] = {}
        self.answered_at = 0.0
        self.num_tokens = 0
        self.pause, self.resume, self.close = engine.pause, engine.resume, engine.close

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        number = next(self._numbers)
        self._asked[number] = (request.name, time.monotonic())
        try:
            result = await self._engine.generate(request)
            self.num_tokens += len(result.token_ids)
            return result
        finally:
            del self._asked[number]
            self.answered_at = time.monotonic()

    def describe(self) -> list[str]:
        """Return a line for each request, the oldest first."""
        now, asked = time.monotonic(), list(self._asked.values())
        lines = [f"{name}: asked {now - at:.0f} s ago, {self._holder(name)}" for name, at in asked[:_SHOWN]]
        return [*lines, *([f"and {len(asked) - _SHOWN} more requests"] if len(asked) > _SHOWN else [])]

    def _holder(self, name: str) -> str:
        holder = self._engine.holder_of(name) if isinstance(self._engine, TakesWeights) else "the engine"
        return f"with {holder}" if holder else "waiting for an engine"


def stall_report(
    producer: Producer, engine: ObservedEngine, proof: PublishProof | None, step: int, waited_s: float
) -> str:
    """Return a report about the groups and requests for which the training thread waits."""
    now, scheduler = time.monotonic(), producer.scheduler
    limits = scheduler.limits
    groups, requests = list(producer.began_at.items()), engine.describe()
    lines = [
        f"No group has ended for {waited_s:.0f} s, and no request was answered. "
        f"Step {step} waits for {limits.batch_size} groups: "
        f"{scheduler.num_buffered} are finished, and {scheduler.num_running} are running (order: {limits.order}, "
        f"max_staleness: {limits.max_staleness}, weights of version {scheduler.version}).",
        *(f"group {uid}: running for {now - began:.0f} s" for uid, began in groups[:_SHOWN]),
        *([f"and {len(groups) - _SHOWN} more groups"] if len(groups) > _SHOWN else []),
        *requests,
    ]
    if proof is not None and proof.unproven is not None:
        lines.append(f"groups with tokens of version {proof.unproven} or newer wait for the proof of these weights")
    if groups and not requests:
        lines.append("no engine has a request: the environments or rewards of these groups have not returned")
    return "\n  ".join(lines)


class Watchdog:
    """A watchdog for one wait of the training thread.

    After `source.watchdog_s` without progress it prints a report, and after `source.stall_timeout_s` it ends the run.
    Progress is a change (see `wait`) or an answered request. `describe` returns the report, given the seconds without
    progress.
    """

    def __init__(
        self, config: AsyncRolloutsConfig, loop: LoopThread, engine: ObservedEngine, describe: Callable[[float], str]
    ) -> None:
        self._config = config
        self._loop = loop
        self._engine = engine
        self._describe = describe
        self._moved_at = self._reported_at = time.monotonic()

    def wait(self, changed: threading.Event) -> None:
        """Wait for `changed`. If it is not set in time, and no request was answered, report."""
        if changed.wait(self._patience()):
            self._moved_at = self._reported_at = time.monotonic()
        elif (answered_at := self._engine.answered_at) > self._moved_at:
            self._moved_at = self._reported_at = answered_at
        else:
            self._report(self._describe)

    def result(self, future: concurrent.futures.Future[T]) -> T:
        """Return the result of a short call on the event loop, and report if the loop is blocked."""
        while True:
            try:
                return future.result(self._patience())
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                self._report(self._describe_block)

    def _patience(self) -> float:
        return max(0.0, self._config.watchdog_s - (time.monotonic() - self._reported_at))

    def _report(self, describe: Callable[[float], str]) -> None:
        self._reported_at = time.monotonic()
        waited_s = self._reported_at - self._moved_at
        text = describe(waited_s)
        limit = self._config.stall_timeout_s
        if waited_s >= limit:
            raise RunFailedError(
                f"{text}\nThe run ends after {limit:g} s (source.stall_timeout_s). The same command resumes it from "
                "the last checkpoint, with the groups that were finished by then."
            )
        tell(text)

    def _describe_block(self, waited_s: float) -> str:
        return (
            f"For {waited_s:.0f} s an environment or reward has blocked the event loop of all rollouts. Run slow code "
            "with spurline_concurrency.calls.in_thread.\n"
            f"{self._loop.position()}"
        )
