"""Members of a pool without any model: each token is a function of those before it, and they die when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from spurline_async_rl.engines.commands import Command, FinishUpdate
from spurline_async_rl.engines.configs import PoolConfig
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.response import Progress
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.protocols.rollout_engine import GenerationRequest
from spurline_rl.trajectory import FinishReason

ENDS = 7
"""The token that ends a response."""


def next_token(context: Sequence[int]) -> int:
    """Return 8 to 99, or sometimes the end."""
    number = xxhash.xxh3_64_intdigest(repr(list(context)).encode())
    return ENDS if number % 23 == 0 else 8 + number % 92


def reference(request: GenerationRequest) -> tuple[list[int], FinishReason]:
    """Return the response of an engine that never dies."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_new_tokens:
        tokens.append(next_token([*request.prompt_ids, *tokens]))
        if tokens[-1] == ENDS:
            return tokens, "stop"
    return tokens, "length"


class Tokenizer:
    """Token 8 is written `h`, 9 `i` and so on."""

    eos_token_id = ENDS

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(96 + token) for token in tokens)


class World:
    """The state that the members of a pool share.

    deaths: number of the token, over all members, at which the member that writes it dies; and how: it raises, or only
    ends, before that token or after it. slow_start: until it is set no member but the first has started.
    """

    def __init__(self, deaths: dict[int, str] | None = None) -> None:
        self.deaths = dict(deaths or {})
        self.members: list[ScriptedMember] = []
        self.written = 0
        self.slow_start: asyncio.Event | None = None
        self.fail_at: dict[str, Callable[[ScriptedMember], bool]] = {}
        self.hang_at: dict[str, Callable[[ScriptedMember], bool]] = {}
        # The event for which a member waits at this point, if any.
        self.stand_at: dict[str, Callable[[ScriptedMember], asyncio.Event | None]] = {}

    def pool(self, engines: int = 2, **settings: Any) -> EnginePool:
        limits = {"start_timeout_s": 5.0, "generate_timeout_s": 30.0, "pause_timeout_s": 5.0, "update_timeout_s": 5.0}
        values: dict[str, Any] = {"name": "scripted", "max_restarts": 100, "close_timeout_s": 1.0, **limits, **settings}
        tokenizer: Any = Tokenizer()
        return EnginePool(
            PoolConfig(engines=engines, **values), self._make_member, transports=("in_process",), tokenizer=tokenizer
        )

    def _make_member(self, number: int) -> ScriptedMember:
        member = ScriptedMember(f"engine {number} life {len(self.members)}", self)
        self.members.append(member)
        return member


class ScriptedMember:
    """An `EngineMember`."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.num_workers, self.weights_dtype = 1, None
        self.version = -1
        self.served: list[str] = []
        self.is_closed = False
        self._world = world
        self._holds: set[str] = set()
        self._go = asyncio.Event()
        self._go.set()
        self._dead = asyncio.Event()

    async def start(self) -> None:
        await self._act("start")
        if self._world.slow_start is not None and self is not self._world.members[0]:
            await self._world.slow_start.wait()

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        assert self.version >= 0, "generates with weights that nobody published"
        self.served.append(request.name)
        while len(progress) < request.sampling.max_new_tokens:
            await self._act("generate")
            await asyncio.sleep(0)
            while self._holds:
                await self._go.wait()
            if self._dead.is_set():
                await asyncio.Event().wait()
            how = self._world.deaths.pop(self._world.written, "")
            self._world.written += 1
            if how.endswith("before"):
                await self._die(how)
            token = next_token([*request.prompt_ids, *progress.token_ids.tolist()])
            progress.add([token], [-float(token)], self.version)
            if how.endswith("after"):
                await self._die(how)
            if token == ENDS:
                return "stop"
        return "length"

    async def control(self, command: Command) -> None:
        if command.name != "resume":
            await self._act(command.name)
        if command.begins:
            self._hold(command.hold)
        if isinstance(command, FinishUpdate):
            self.version = command.version
        if command.ends:
            self._release(command.hold)

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return "it was told to"

    async def close(self) -> None:
        self.is_closed = True

    async def _die(self, how: str) -> None:
        self._dead.set()
        if how.startswith("raise"):
            raise EngineDiedError(f"{self.name} is dead")
        await asyncio.Event().wait()

    async def _act(self, what: str) -> None:
        await asyncio.sleep(0)
        if what in self._world.fail_at and self._world.fail_at[what](self):
            raise RuntimeError(f"cannot {what}")
        if what in self._world.hang_at and self._world.hang_at[what](self):
            await asyncio.Event().wait()
        if what in self._world.stand_at and (event := self._world.stand_at[what](self)) is not None:
            await event.wait()

    def _hold(self, why: str) -> None:
        self._holds.add(why)
        self._go.clear()

    def _release(self, why: str) -> None:
        self._holds.discard(why)
        if not self._holds:
            self._go.set()


class Trainer:
    """Publishes versions to a pool, and the last one to every engine that awaits it."""

    def __init__(self, pool: EnginePool) -> None:
        self.version = -1
        self._pool = pool
        self._one_at_a_time = asyncio.Lock()
        self._wanted = asyncio.Event()
        pool.on_awaiting_weights = self._wanted.set

    async def publish(self, engine: Any = None, version: int | None = None) -> None:
        async with self._one_at_a_time:
            self.version = self.version if version is None else version
            taking = engine or self._pool
            if engine is not None and engine not in self._pool.awaiting_weights:
                return
            await taking.begin_update(self.version)
            await taking.load_bucket(WeightBucket("in_process", ()))
            await taking.finish_update(self.version)

    async def serve(self) -> None:
        """Publish to the engines that wait, for ever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            for engine in self._pool.awaiting_weights if self.version >= 0 else ():
                await self.publish(engine)
