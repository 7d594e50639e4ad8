"""Run one engine of a pool, from its start to its death, with all time limits.

A `PooledEngine` runs a member, which is a child process, a vLLM engine, an actor or a server. Members know nothing
about other members, routing, retries or time limits. An error of a member ends its `PooledEngine`, and the pool makes a
new `PooledEngine`. The error does not end an update or a pause of the other engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from spurline.errors import BucketLostError, RunFailedError, UserError
from spurline_async_rl.engines.commands import SLEEP, UPDATE, Command, ControlledEngine, LoadBucket, Sleep
from spurline_async_rl.engines.configs import PoolConfig
from spurline_async_rl.engines.response import Progress
from spurline_rl.protocols.rollout_engine import GenerationRequest
from spurline_rl.trajectory import FinishReason


class EngineDiedError(RunFailedError):
    """An engine has died. The text says which one, and why."""


class EngineMember(Protocol):
    """One engine. All coroutines are awaited on one event loop, and cancelled if they exceed a time limit."""

    name: str
    """The name in messages, such as `engine 0 (process 4711)`."""

    @property
    def num_workers(self) -> int:
        """Return how many processes have weights of the engine. This and `weights_dtype` are known after the start."""
        ...

    @property
    def weights_dtype(self) -> str | None:
        """See `TakesWeights`."""
        ...

    async def start(self) -> None:
        """Start the engine. Raises EngineDiedError if that fails."""
        ...

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        """Generate, and add tokens to `progress` as they come. Cancelling the call aborts the request in the engine.

        Raises:
            DataError: If the model cannot answer the request.
            EngineDiedError: If the engine has died.
        """
        ...

    async def control(self, command: Command) -> None:
        """Carry out the command. An error ends the engine."""
        ...

    async def wait_dead(self) -> str:
        """Wait until the engine dies by itself, and return the reason, such as the end of its log."""
        ...

    async def close(self) -> None:
        """End the engine's processes. If this call is cancelled, kill them. May be called at any time, even twice."""
        ...


State = Literal["starting", "awaiting", "ready", "dead"]
"""An `awaiting` engine has started, but must not generate before it gets weights."""

_GIVEN_UP_CLOSE_S = 5.0
"""Time limit in seconds to close an engine that is dead or has not started. After that, its processes are killed."""
_LOOK_S = 0.01
"""Seconds between two looks at the tokens of a request."""
_BEGINNING_S = 0.5
"""Seconds that an update may wait for the first token of the request that crosses it; see `begin_crossing`."""
_HANDING_OVER_S = 1.0
"""Seconds in which the member of a dead engine may add its last tokens to `Progress`."""


@dataclass(eq=False, slots=True)
class _Awaited:
    """A request to the member. The caller awaits `answer`, since `work` may take longer to stop.

    `seen` is the number of tokens at the last check. The wait for the next token began at `since`.
    """

    name: str
    progress: Progress
    work: asyncio.Task[FinishReason]
    answer: asyncio.Future[FinishReason]
    since: float
    seen: int = 0

    def settle(self, work: asyncio.Task[FinishReason]) -> None:
        if self.answer.done():
            _retrieve(work)
        elif work.cancelled():
            self.answer.cancel()
        elif (error := work.exception()) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(work.result())

    def fail(self, reason: str) -> None:
        """Fail the request because its engine is dead."""
        if not self.work.done() and not self.answer.done():
            self.answer.set_exception(EngineDiedError(reason))
            self.work.cancel()


class PooledEngine(ControlledEngine):
    """A member with its time limits. `on_change` is called when `state` has changed."""

    def __init__(
        self, member: EngineMember, config: PoolConfig, transports: Sequence[str], on_change: Callable[[], None]
    ) -> None:
        self.state: State = "starting"
        self.load = 0
        self.has_begun = False
        self.has_started = False
        # True once the engine's processes have ended.
        self.has_ended = False
        # True if the engine died because a command failed while it was alive.
        self.has_refused = False
        # True while the engine still carries out a command of an update that continues without it.
        self.is_late = False
        # True if the engine did not generate with the weights that it had confirmed.
        self.is_rejected = False
        # The engine has proven that it generates with the weights of this version. -1 means no version.
        self.proven_version = -1
        self.transports = transports
        self._member = member
        self._config = config
        self._on_change = on_change
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._user_error: UserError | None = None
        self._asked: set[asyncio.Future[None]] = set()
        self._awaited: set[_Awaited] = set()
        # The holds in which the engine takes part.
        self.holds: set[str] = set()
        self._moved_at = 0.0
        self._crossing: tuple[Progress, asyncio.Task[FinishReason]] | None = None

    @property
    def name(self) -> str:
        return self._member.name

    @property
    def receivers(self) -> Mapping[str, int]:
        return {} if self.state == "dead" else {self.name: self._member.num_workers}

    @property
    def weights_dtype(self) -> str | None:
        return self._member.weights_dtype

    @property
    def may_have_memory(self) -> bool:
        if self.has_ended or not self.has_begun:
            return False
        return self.state == "dead" or SLEEP not in self.holds

    @property
    def reason(self) -> str:
        """Return why the engine died, or an empty text while it lives."""
        return self._end.result() if self._end.done() else ""

    async def live(self) -> str:
        """Start the engine, wait until it dies, and return the reason.

        Raises:
            UserError: If the user must correct something before the engine can start.
        """
        self.has_begun = True
        if await self._ask("start", self._member.start(), "start_timeout_s"):
            self.has_started = True
            self._become("awaiting")
            death = asyncio.ensure_future(self._member.wait_dead())
            # Checking all requests periodically is cheaper than a timer for each request.
            tick = self._config.generate_timeout_s / 4
            try:
                while not self._end.done():
                    await asyncio.wait({death, self._end}, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
                    if death.done():
                        self.kill(f"{self.name} ended: {death.result()}")
                    self._check_progress()
            finally:
                death.cancel()
        if self._user_error is not None:
            raise self._user_error
        return self.reason

    def kill(self, reason: str) -> None:
        """Mark the engine as dead, and fail its requests with EngineDiedError. `close` ends its processes."""
        if not self._end.done():
            self._end.set_result(reason)
            # Requests do not wait for `_end`. With thousands of waiters, each wakeup would search all other waiters.
            for awaited in self._awaited:
                awaited.fail(reason)
            self._become("dead")

    async def close(self) -> None:
        """End the engine's processes. The time limit is `close_timeout_s`, or less for an engine that does not run."""
        ends_in_order = self.has_started and not self._end.done()
        limit = self._config.close_timeout_s if ends_in_order else _GIVEN_UP_CLOSE_S
        self.kill(f"{self.name} was closed")
        if self._asked:
            # A cancelled start may still create processes.
            await asyncio.wait(self._asked, timeout=_GIVEN_UP_CLOSE_S)
        try:
            async with asyncio.timeout(limit) as deadline:
                await self._member.close()
        except TimeoutError:
            if not deadline.expired():
                raise
            # The member was cancelled, so it has killed its processes.
        self.has_ended = True
        self._on_change()

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        """Have the member generate. Raises EngineDiedError also if no token comes within the time limit."""
        if self._end.done():
            raise EngineDiedError(self.reason)
        loop = asyncio.get_running_loop()
        # The member runs in a task, so that the caller need not wait if the member stops slowly.
        work = loop.create_task(self._member.generate(request, progress))
        awaited = _Awaited(request.name, progress, work, loop.create_future(), loop.time())
        work.add_done_callback(awaited.settle)
        self._awaited.add(awaited)
        self.load += 1
        try:
            return await awaited.answer
        except EngineDiedError as error:
            self.kill(str(error))
            # A cancelled member adds its last tokens to `progress`.
            await asyncio.wait({work}, timeout=_HANDING_OVER_S)
            raise
        finally:
            self.load -= 1
            self._awaited.discard(awaited)
            work.cancel()
            if awaited.answer.done():
                _retrieve(awaited.answer)

    @property
    def is_crossing(self) -> bool:
        """Return whether `begin_crossing` has begun a request whose tokens were not taken yet."""
        return self._crossing is not None

    async def begin_crossing(self, request: GenerationRequest) -> None:
        """Begin a request before an update. Return when it has its first token, or after `_BEGINNING_S`."""
        if self.state != "ready" or self._crossing is not None:
            return
        progress = Progress()
        work = asyncio.create_task(self.generate(request, progress))
        work.add_done_callback(_retrieve)
        self._crossing = (progress, work)
        began = asyncio.get_running_loop().time()
        # A busy engine may let the request wait, but the update must not wait longer.
        await self._until_crossing(
            lambda: len(progress) > 0 or asyncio.get_running_loop().time() - began > _BEGINNING_S
        )

    async def take_crossed(self, version: int, num_tokens: int) -> Progress:
        """End the request of `begin_crossing` when `num_tokens` of its tokens have this version. Return all tokens."""
        assert self._crossing is not None
        progress, work = self._crossing
        await self._until_crossing(lambda: progress.count_of(version) >= num_tokens)
        work.cancel()
        self._crossing = None
        return progress

    async def _until_crossing(self, condition: Callable[[], bool]) -> None:
        """Return when the condition is true, or the request has ended. `generate` limits the time."""
        assert self._crossing is not None
        while not condition() and not self._crossing[1].done():
            await asyncio.wait({self._crossing[1]}, timeout=_LOOK_S)

    async def control(self, command: Command) -> None:
        """Have the member carry out the command. If this fails or takes too long, the engine dies.

        Raises:
            BucketLostError: If a bucket did not reach the engine. The engine does not die of this error.
        """
        if command.begins:
            self.holds.add(command.hold)
        if command.hold not in self.holds:
            # The engine was started after the hold began.
            return
        if isinstance(command, LoadBucket):
            command = replace(command, bucket=replace(command.bucket, receiver=self.name))
        if await self._ask(str(command), self._member.control(command), command.limit) and command.ends:
            self.holds.discard(command.hold)
            # The time of the hold must not count as waiting for tokens.
            self._moved_at = asyncio.get_running_loop().time()
            for awaited in self._awaited:
                awaited.since = self._moved_at
            if command.hold == UPDATE:
                # The other engines may have newer weights than a late one has now.
                self._become("awaiting" if self.is_late else "ready")
        elif isinstance(command, Sleep) and not command.keep_weights:
            # The engine has dropped its weights.
            self._become("awaiting")

    def leave_update(self, answer: asyncio.Future[None]) -> None:
        """Let the update continue without this engine. It can get weights again when `answer` is done.

        `answer` is its answer to the current command.
        """

        def rejoin(answer: asyncio.Future[None]) -> None:
            _retrieve(answer)
            self.is_late = False
            self.holds.discard(UPDATE)
            self._on_change()

        self.is_late = True
        self._become("awaiting")
        if self._crossing is not None:
            self._crossing[1].cancel()
            self._crossing = None
        answer.add_done_callback(rejoin)

    async def _ask(self, what: str, work: Coroutine[Any, Any, None], setting: str) -> bool:
        """Await the work, and return whether it succeeded within the setting's time limit. If not, kill the engine."""
        if self._end.done():
            work.close()
            return False
        limit_s: float = getattr(self._config, setting)
        task = asyncio.ensure_future(work)
        task.add_done_callback(_retrieve)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        try:
            await asyncio.wait({task, self._end}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                return False
            if not task.done():
                self.kill(f"{self.name} did not {what} within {limit_s:g} s (source.engine.{setting})")
            elif task.cancelled():
                self.kill(f"{self.name} could not {what}: the engine itself cancelled the call")
            elif isinstance(error := task.exception(), BucketLostError):
                raise error
            elif error is not None:
                self._user_error = error if isinstance(error, UserError) else None
                self.has_refused = not isinstance(error, EngineDiedError)
                kind = "" if isinstance(error, EngineDiedError) else f"{type(error).__name__}: "
                self.kill(f"{self.name} could not {what}: {kind}{error}")
            return not self._end.done()
        finally:
            task.cancel()

    def _check_progress(self) -> None:
        """Kill the engine if a request has waited too long for its next token.

        A request without tokens may be queued behind others, so its wait begins anew with each token of any request.
        """
        now, limit = asyncio.get_running_loop().time(), self._config.generate_timeout_s
        for awaited in self._awaited:
            if self.holds or len(awaited.progress) > awaited.seen:
                awaited.seen, awaited.since = len(awaited.progress), now
                self._moved_at = now if awaited.seen else self._moved_at
        for awaited in self._awaited:
            if now - (awaited.since if awaited.seen else max(awaited.since, self._moved_at)) >= limit:
                self.kill(
                    f"{self.name} gave no further token to {awaited.name} for {limit:g} s, after {awaited.seen} tokens "
                    "(source.engine.generate_timeout_s)"
                )
                return

    def _become(self, state: State) -> None:
        if self.state != "dead":
            self.state = state
            self._on_change()


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Read the error, because asyncio warns of errors that nobody has read."""
    _ = task.cancelled() or task.exception()
