"""Members of a pool that are child engines in all but the process: the child's own code, its messages as text, and an
engine in it that writes what `scripted_members` writes. They die when told to, with all that was not handed over."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripted_members import ENDS, Tokenizer, next_token

from spurline_async_rl.engines.child.main import Child
from spurline_async_rl.engines.child.member import ChildMember
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.engines.pool import EnginePool
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.engines.in_process.response import Written
from spurline_rl.protocols.rollout_engine import GenerationRequest

LIMITS = {"start_timeout_s": 5.0, "generate_timeout_s": 30.0, "pause_timeout_s": 5.0, "update_timeout_s": 5.0}
PROMPT = 2
"""Tokens in the prompt of every request."""


class World:
    """The state that the members of a pool share.

    deaths: numbers of tokens, over all members, behind which the member that wrote it dies. flushes: behind which it
    hands over what it has, as it does when a second has passed.
    writes: (request, index in the response) -> (member, version) of everyone who wrote that token, in order.
    """

    def __init__(self, chunk_tokens: int, deaths: set[int], flushes: set[int]) -> None:
        self.deaths, self.flushes = set(deaths), set(flushes)
        self.members: list[LoopbackMember] = []
        self.writes: dict[tuple[str, int], list[tuple[LoopbackMember, int]]] = defaultdict(list)
        self.written = 0
        self._settings: dict[str, Any] = {"chunk_tokens": chunk_tokens, "max_restarts": 1000, **LIMITS}

    def pool(self, engines: int) -> EnginePool:
        config = ChildProcessEngineConfig(engines=engines, close_timeout_s=1.0, **self._settings)
        tokenizer: Any = Tokenizer()
        return EnginePool(config, lambda _: self._make_member(config), transports=("in_process",), tokenizer=tokenizer)

    def _make_member(self, config: ChildProcessEngineConfig) -> LoopbackMember:
        self.members.append(LoopbackMember(len(self.members), config, self))
        return self.members[-1]


class LoopbackMember(ChildMember):
    """is_alive: whether its messages arrive. told: number of tokens that have."""

    def __init__(self, number: int, config: ChildProcessEngineConfig, world: World) -> None:
        run: Any = SimpleNamespace(run_dir=Path("no-run"), backend=SimpleNamespace(rank_request=lambda: None))
        super().__init__(number, config, run)
        self.is_alive = True
        self.told = 0
        self.engine = ScriptedEngine(self, world)

    async def start(self) -> None:
        parent: Any = SimpleNamespace(send=self._arrive)
        server: Any = Child(parent)
        server._readers = {"in_process": lambda bucket: iter(())}
        server.use(self.engine, self._config)
        child: Any = SimpleNamespace(
            send=lambda message: self.is_alive and server.take(json.loads(json.dumps(message))),
            close_input=self.die,
            kill=lambda: None,
            end=lambda: None,
        )
        self._server, self._child = server, child

    def flush(self) -> None:
        """Send what has been written, as the child's timer does."""
        self._server._chunks.flush()

    def die(self) -> None:
        """Die as a killed process does, with everything that was not sent."""
        if self.is_alive:
            self.is_alive = False
            for task in self._server._tasks.values():
                task.cancel()
            self._note_end("killed", "")

    def _arrive(self, *messages: Any) -> None:
        if self.is_alive:
            self._take([json.loads(json.dumps(message)) for message in messages])
            self.told += sum(count for message in messages for _, count in message.get("versions", ()))


class ScriptedEngine:
    """An engine for a child: it writes a token of each response in turn, and none while it is paused."""

    def __init__(self, member: LoopbackMember, world: World) -> None:
        self.version = -1
        self.written = 0
        self._member, self._world = member, world
        self._holds: set[str] = set()

    async def generate(self, request: GenerationRequest, on_tokens: Callable[[Written], None]) -> None:
        context = list(request.prompt_ids)
        for left in reversed(range(request.sampling.max_new_tokens)):
            await asyncio.sleep(0)
            while self._holds:
                await asyncio.sleep(0)
            assert self.version >= 0, "generates with weights that nobody published"
            token = next_token(context)
            self._world.writes[request.name, len(context) - PROMPT].append((self._member, self.version))
            context.append(token)
            self.written += 1
            reason = "stop" if token == ENDS else None if left else "length"
            on_tokens(Written([token], [-float(token)], [-float(token)], [self.version], reason))
            number, self._world.written = self._world.written, self._world.written + 1
            if number in self._world.flushes:
                self._member.flush()
            if number in self._world.deaths:
                self._member.die()
            if reason is not None:
                return

    async def pause(self) -> None:
        self._holds.add("pause")

    async def resume(self) -> None:
        self._holds.discard("pause")

    async def begin_update(self, version: int) -> None:
        self._holds.add("update")

    async def load_bucket(self, bucket: WeightBucket) -> None:
        pass

    async def finish_update(self, version: int) -> None:
        self.version = version
        self._holds.discard("update")

    async def close(self) -> None:
        pass
