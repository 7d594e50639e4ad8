"""Run several engines behind one object, and replace engines that die.

A dead engine is started again and waits for the current weights. Other engines continue its requests from the tokens
that it has generated. While the pool sleeps, no engine is started, because the trainer has the memory of the devices.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError, RunFailedError, SpurlineError
from spurline.terminal import tell
from spurline_async_rl.engines.commands import SLEEP, UPDATE, Command, ControlledEngine, Sleep
from spurline_async_rl.engines.configs import PoolConfig
from spurline_async_rl.engines.member import EngineDiedError, EngineMember, PooledEngine
from spurline_async_rl.engines.response import Progress, Response
from spurline_rl.engines.in_process.response import check_request
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, TakesWeights
from spurline_rl.trajectory import FinishReason

T = TypeVar("T")

_SLACK = 16
"""A request goes to the engine that had its prompt, if the load there is at most this much above the lowest load."""
_REMEMBERED = 8192
"""Number of prompts for which the router remembers the engine."""
_LONGEST_BREAK_S = 60.0
"""Longest wait before an engine is started again. The wait is 1 s at first, and doubles with each failed start."""
_PATIENCE_S, _PATIENCE = 5.0, 3.0
"""In an update, when half of the engines have answered a command, the others get `_PATIENCE_S` more seconds, or
`_PATIENCE` times as many as the first half took, whichever is longer."""
_FIRST_TRIES = 3
"""If no engine has ever started, the run ends after this many failed starts of one engine."""


class Router:
    """Chooses the engine with the fewest requests, or the engine that had the prompt before and may have cached it."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, PooledEngine] = OrderedDict()

    def choose(self, name: str, engines: Sequence[PooledEngine]) -> PooledEngine:
        """Return the engine for a request. The part of its name before ` sample ` names the prompt."""
        prompt = name.partition(" sample ")[0]
        chosen = min(engines, key=lambda engine: engine.load)
        home = self._homes.get(prompt)
        if home is not None and home in engines and home.load <= chosen.load + _SLACK:
            chosen = home
        self._homes[prompt] = chosen
        self._homes.move_to_end(prompt)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen


class EnginePool(ControlledEngine):
    """A `RolloutEngine` that `TakesWeights`.

    The first call of any method except `close` starts the engines. Requests wait until the first update is finished,
    and while the pool sleeps. `make_member` returns a new member for the number of an engine. It is called again when
    the engine has died.
    """

    def __init__(
        self,
        config: PoolConfig,
        make_member: Callable[[int], EngineMember],
        *,
        transports: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.transports = transports
        self.longest_start_s = config.start_timeout_s * (config.max_restarts + 1)
        self._config = config
        self._make_member = make_member
        self._tokenizer = tokenizer
        self._engines: list[PooledEngine] = []
        self._lives: list[asyncio.Task[None]] = []
        self._held: dict[str, list[PooledEngine]] = {}
        self._holders: dict[str, PooledEngine] = {}
        self._router = Router()
        self._change = asyncio.Event()
        self._deaths = 0
        self._down_s = 0.0
        self._down_since: float | None = None
        self._has_started = False
        self._any_started = False
        self._failure: Exception | None = None
        # Numbers of the engines that were rejected and whose replacements have not been accepted yet.
        self._rejected: set[int] = set()

    @property
    def awaiting_weights(self) -> Sequence[TakesWeights]:
        return [each for each in self._engines if each.state == "awaiting" and not each.holds & {UPDATE, SLEEP}]

    @property
    def receivers(self) -> Mapping[str, int]:
        of_each = (engine.receivers for engine in self._held.get(UPDATE, []))
        return {name: count for receivers in of_each for name, count in receivers.items()}

    @property
    def weights_dtype(self) -> str | None:
        return next((engine.weights_dtype for engine in self._started()), None)

    def holder_of(self, name: str) -> str | None:
        engine = self._holders.get(name)
        return None if engine is None else engine.name

    def seconds_down(self) -> float:
        since = self._down_since
        return self._down_s + (0.0 if since is None else time.monotonic() - since)

    async def start(self) -> None:
        """Wait until all engines have started. Raises RunFailedError if that fails."""
        self._open()
        # This needs no time limit, since the time of each start and the number of starts are limited.
        await self._until("start", lambda: len(self._started()) == len(self._engines))

    async def wait_for_one(self) -> None:
        """Wait until at least one engine has started, or the pool sleeps."""
        self._open()
        await self._until("a publish", lambda: SLEEP in self._held or self._started())

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        check_request(request)
        self._check(request.name)
        self._open()
        response = Response(request, self._tokenizer)
        while True:
            # During a pause or sleep, even new engines must not generate.
            ready = await self._until(request.name, lambda: self._ready() if self._held.keys() <= {UPDATE} else [])
            engine = self._router.choose(request.name, ready)
            self._holders[request.name] = engine
            progress = Progress()
            try:
                reason = await engine.generate(response.rest(), progress)
            except EngineDiedError:
                # `_keep_alive` reports the death. Another engine continues the response.
                reason = None
                if engine.is_rejected or self.needs_proof:
                    progress.cut_after(engine.proven_version)
            except DataError:
                if not response.has_tokens:
                    raise
                # An engine has accepted the prompt before, so the generated tokens now fill the model's context.
                return response.result("length")
            finally:
                self._holders.pop(request.name, None)
            reason = response.add(progress, reason, engine.name)
            if reason is not None:
                return response.result(reason)

    async def generate_on_each(
        self, request: GenerationRequest, names: Collection[str] | None = None
    ) -> Mapping[str, GenerationResult]:
        async def answer(engine: PooledEngine) -> GenerationResult:
            progress = Progress()
            try:
                reason = await engine.generate(request, progress)
            except EngineDiedError:
                # The engine that replaces this one answers after an update of its own.
                progress, reason = Progress(), None
            return self._result_of(engine, request, progress, reason)

        await self._until(request.name, lambda: not self._held)
        # Do not wait for dead engines. Their replacements need the thread that waits for these answers.
        ready = [engine for engine in self._ready() if names is None or engine.name in names]
        answers = await asyncio.gather(*map(answer, ready))
        return {engine.name: found for engine, found in zip(ready, answers, strict=True)}

    async def take_crossed(self, version: int, num_tokens: int) -> Mapping[str, GenerationResult]:
        crossing = [engine for engine in self._engines if engine.is_crossing]
        parts = await asyncio.gather(*(engine.take_crossed(version, num_tokens) for engine in crossing))
        results: dict[str, GenerationResult] = {}
        for engine, progress in zip(crossing, parts, strict=True):
            assert self.crossing is not None
            progress.cut_beyond(version, num_tokens)
            results[engine.name] = self._result_of(engine, self.crossing, progress, None)
        return results

    def _result_of(
        self, engine: PooledEngine, request: GenerationRequest, progress: Progress, reason: FinishReason | None
    ) -> GenerationResult:
        """Return the result of a request that only this engine has worked on, even if it has not ended."""
        response = Response(request, self._tokenizer)
        return response.result(response.add(progress, reason, engine.name) or "abort")

    def accept(self, name: str, version: int) -> None:
        for number, engine in enumerate(self._engines):
            if engine.name == name:
                engine.proven_version = version
                self._rejected.discard(number)

    def reject(self, name: str, reason: str) -> None:
        for number, engine in enumerate(self._engines):
            if engine.name == name:
                if number in self._rejected:
                    raise RunFailedError(f"{name} was started again for the same reason before: {reason}.")
                self._rejected.add(number)
                engine.is_rejected = True
                engine.kill(f"{name} does not have the published weights: {reason}")

    async def control(self, command: Command) -> None:
        """Send the command to all engines that take part in its hold.

        The call does not wait for an engine that dies. The engine that replaces it must get the weights before it
        generates. An update does not wait for a very slow engine, which gets the weights later, in a publish of its
        own. After `Sleep`, no process has device memory, not even a process of a dead engine.

        Raises:
            RunFailedError: If all engines have failed in an update or sleep.
            BucketLostError: If a living engine did not get a bucket.
        """
        self._check(command.name)
        self._open()
        if command.begins:
            self._held[command.hold] = await self._ready_for(command)
            if command.hold == UPDATE and self.crossing is not None and self._held.keys() == {UPDATE}:
                crossing = [engine.begin_crossing(self.crossing) for engine in self._held[UPDATE]]
                await asyncio.gather(*crossing)
        engines = self._held.get(command.hold, [])
        answers, behind = await self._answers(engines, command)
        refusals = [engine.reason for engine in engines if engine.has_refused]
        alive = [engine for engine in engines if engine.state != "dead" and engine not in behind]
        if command.ends:
            self._held.pop(command.hold, None)
            self._changed()
        elif command.hold in self._held:
            self._held[command.hold] = alive
        if isinstance(command, Sleep):
            # This needs no time limit, since closing an engine has one.
            await self._until("sleep", lambda: not any(engine.may_have_memory for engine in self._engines))
        if command.hold in (UPDATE, SLEEP) and refusals and not alive:
            what = "takes the new weights" if command.hold == UPDATE else f"could {command}"
            raise RunFailedError(f"No engine {what}: {'; '.join(refusals)}")
        for error in filter(None, answers):
            raise error

    async def _answers(
        self, engines: Sequence[PooledEngine], command: Command
    ) -> tuple[list[BaseException | None], list[PooledEngine]]:
        """Send the command to these engines. Return their errors, and the engines that are too slow for the update."""
        loop = asyncio.get_running_loop()
        began, limit_s = loop.time(), None
        answers = [asyncio.ensure_future(engine.control(command)) for engine in engines]
        late = set(answers)
        try:
            if command.hold == UPDATE:
                while 2 * len(late) > len(answers):
                    _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
                limit_s = max(_PATIENCE_S, _PATIENCE * (loop.time() - began))
            if late:
                _, late = await asyncio.wait(late, timeout=limit_s)
        except asyncio.CancelledError:
            for answer in answers:
                answer.cancel()
            raise
        behind = {engine: answer for engine, answer in zip(engines, answers, strict=True) if answer in late}
        for engine, answer in behind.items():
            engine.leave_update(answer)
            tell(f"{engine.name} takes long to {command}. The other engines go on, and it gets these weights later.")
        answered = [answer for answer in answers if answer not in late]
        return await asyncio.gather(*answered, return_exceptions=True), [*behind]

    async def _ready_for(self, command: Command) -> list[PooledEngine]:
        """Return the engines that take part in the hold of this command. The first update waits for all engines."""
        if command.hold == SLEEP:
            # No further engine is started, but a start in progress is not interrupted. Otherwise an engine that
            # starts slowly might never finish its start between two sleeps.
            self._held[SLEEP] = []
            self._changed()
            await self._until(
                "sleep", lambda: not any(each.has_begun and each.state == "starting" for each in self._engines)
            )
            return self._started()
        if SLEEP in self._held:
            return [engine for engine in self._held[SLEEP] if engine.state != "dead"]
        if command.hold != UPDATE:
            return self._ready()
        if not self._has_started:
            await self.start()
            self._has_started = True
        return await self._until(command.name, lambda: [engine for engine in self._started() if not engine.is_late])

    async def close(self) -> None:
        self._fail(RunFailedError("they were closed"))
        # This needs no time limit, since closing an engine has one.
        await asyncio.gather(*self._lives, return_exceptions=True)

    def _open(self) -> None:
        if not self._engines and self._failure is None:
            self._engines = [self._new_engine(number) for number in range(self._config.engines)]
            self._note_down()
            self._lives = [asyncio.create_task(self._keep_alive(number)) for number in range(self._config.engines)]

    def _new_engine(self, number: int) -> PooledEngine:
        engine = PooledEngine(self._make_member(number), self._config, self.transports, self._changed)
        engine.takes_adapters = self.takes_adapters
        return engine

    async def _keep_alive(self, number: int) -> None:
        """Run engine `number`, and replace it after each death, until engines have died too often."""
        failed_starts = 0
        try:
            while self._failure is None:
                # Wait before another start, because a server may come back after a while.
                await asyncio.sleep(min(_LONGEST_BREAK_S, 2.0 ** (failed_starts - 1)) if failed_starts else 0)
                await self._until("a start", lambda: SLEEP not in self._held)
                engine = self._engines[number]
                try:
                    reason = await engine.live()
                finally:
                    await engine.close()
                failed_starts = 0 if engine.has_started else failed_starts + 1
                if self._failure is not None:
                    return
                if failed_starts >= _FIRST_TRIES and not self._any_started:
                    raise RunFailedError(f"No engine has started in {failed_starts} tries. The last error: {reason}")
                self._deaths += 1
                if self._deaths > self._config.max_restarts:
                    raise RunFailedError(
                        f"{self._deaths} engines have died in this run (source.engine.max_restarts is "
                        f"{self._config.max_restarts}). The last one: {reason}"
                    )
                # The proof has told of an engine that it rejected.
                if not engine.is_rejected:
                    tell(
                        f"An engine has died and is started again ({self._deaths} of at most "
                        f"{self._config.max_restarts}, source.engine.max_restarts): {reason}"
                    )
                self._engines[number] = self._new_engine(number)
        except Exception as error:  # noqa: BLE001 - raised by all later calls
            self._fail(error)

    def _ready(self) -> list[PooledEngine]:
        return [engine for engine in self._engines if engine.state == "ready"]

    def _started(self) -> list[PooledEngine]:
        return [engine for engine in self._engines if engine.state in ("awaiting", "ready")]

    async def _until(self, who: str, condition: Callable[[], T]) -> T:
        """Wait until the condition is true, and return its value. `who` names the waiting call in errors."""
        while True:
            self._check(who)
            if met := condition():
                return met
            await self._change.wait()

    def _changed(self) -> None:
        self._note_down()
        self._any_started = self._any_started or bool(self._started())
        self._change.set()
        self._change = asyncio.Event()
        if self.on_awaiting_weights is not None and self.awaiting_weights:
            self.on_awaiting_weights()

    def _note_down(self) -> None:
        is_up = bool(self._ready()) and SLEEP not in self._held
        if is_up and self._down_since is not None:
            self._down_s, self._down_since = self.seconds_down(), None
        elif not is_up and self._down_since is None:
            self._down_since = time.monotonic()

    def _check(self, who: str) -> None:
        """If the pool has failed, raise a new error. The failure is its cause."""
        if self._failure is not None:
            kind = "" if isinstance(self._failure, SpurlineError) else f"{type(self._failure).__name__}: "
            raise RunFailedError(f"{who}: the rollout engines have ended: {kind}{self._failure}") from self._failure

    def _fail(self, failure: Exception) -> None:
        """End all engines, and make all calls fail."""
        if self._failure is None:
            self._failure = failure
            for life in self._lives:
                if life is not asyncio.current_task():
                    life.cancel()
        self._changed()
