"""Child engines in all but the process: the child's own code, its messages as text, and a scripted model in it."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_members import ENDS, Tokenizer, Trainer, next_token, reference

from spurline.errors import RunFailedError
from spurline_async_rl.engines.child_process import Child, ChildMember
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.engines.pool import EnginePool
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.engines.in_process.response import Written
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling


class World:
    """Members die behind the tokens with these numbers, over all members; `versions` are of all who wrote a token."""

    def __init__(self, deaths: set[int]) -> None:
        self.deaths = set(deaths)
        self.written = 0
        self.versions: dict[tuple[str, int], list[int]] = defaultdict(list)

    def pool(self, engines: int) -> EnginePool:
        config = ChildProcessEngineConfig(engines=engines, max_restarts=1000, close_timeout_s=1.0)
        tokenizer: Any = Tokenizer()
        make = lambda number: LoopbackMember(number, config, self)  # noqa: E731
        return EnginePool(config, make, transports=("in_process",), tokenizer=tokenizer)


class LoopbackMember(ChildMember):
    """A member whose child is an object of this process. When it dies, what was not sent is lost."""

    def __init__(self, number: int, config: ChildProcessEngineConfig, world: World) -> None:
        run: Any = SimpleNamespace(run_dir=Path("no-run"), backend=SimpleNamespace(rank_request=lambda: None))
        super().__init__(number, config, run)
        self.is_alive = True
        self._world = world

    async def start(self) -> None:
        self._server: Any = Child(SimpleNamespace(send=self._arrive))  # type: ignore[arg-type]
        self._server._reader = SimpleNamespace(read=lambda bucket: iter(()), end_update=lambda: None)
        self._server.engine = ScriptedEngine(self, self._world)
        send = lambda message: self.is_alive and self._server.take(json.loads(json.dumps(message)))  # noqa: E731
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        child: Any = SimpleNamespace(send=send, close_input=self.die, kill=nothing, end=nothing)
        self._child = child

    def die(self) -> None:
        if self.is_alive:
            self.is_alive = False
            for task in self._server._tasks.values():
                task.cancel()
            self._note_end("killed", "")

    def _arrive(self, *messages: Any) -> None:
        if self.is_alive:
            self._take([json.loads(json.dumps(message)) for message in messages])


class ScriptedEngine:
    """An engine for a child: it writes a token of each response in turn, and none while it is held."""

    def __init__(self, member: LoopbackMember, world: World) -> None:
        self.version = -1
        self._member, self._world = member, world
        self._holds: set[str] = set()

    async def generate(self, request: GenerationRequest, on_tokens: Callable[[Written], None]) -> None:
        context, told = list(request.prompt_ids), 0
        for left in reversed(range(request.sampling.max_new_tokens)):
            await asyncio.sleep(0)
            while self._holds:
                await asyncio.sleep(0)
            assert self.version >= 0, "generates with weights that nobody published"
            token = next_token(context)
            # Those of all tokens before it: of each its index.
            experts = np.arange(told, len(context), dtype=np.int16).reshape(-1, 1, 1)
            told = len(context)
            self._world.versions[request.name, len(context)].append(self.version)
            context.append(token)
            reason = "stop" if token == ENDS else None if left else "length"
            on_tokens(Written([token], [-float(token)], [self.version], reason, experts))
            number, self._world.written = self._world.written, self._world.written + 1
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

    async def load_bucket(self, bucket: WeightBucket) -> None: ...

    async def finish_update(self, version: int) -> None:
        self.version = version
        self._holds.discard("update")

    async def close(self) -> None: ...


async def results_of(
    world: World, engines: int, requests: list[GenerationRequest], publishes: int, pauses: int
) -> list[GenerationResult]:
    pool = world.pool(engines)
    trainer = Trainer(pool)
    serving = asyncio.create_task(trainer.serve())

    async def disturb() -> None:
        for version in range(1, publishes + 1):
            await trainer.publish(version=version)
        for _ in range(pauses):
            await pool.pause()
            await pool.resume()

    try:
        async with asyncio.timeout(20):
            await trainer.publish(version=0)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(disturb())
                writing = [tasks.create_task(pool.generate(request)) for request in requests]
            return [task.result() for task in writing]
    finally:
        await pool.close()
        serving.cancel()
        with suppress(asyncio.CancelledError, RunFailedError):
            await serving


@settings(max_examples=60)
@given(
    engines=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    deaths=st.sets(st.integers(0, 120), max_size=5),
    publishes=st.integers(0, 3),
    pauses=st.integers(0, 3),
)
def test_messages_bring_what_was_written_with_its_version_whichever_engine_dies_and_when(
    engines: int, lengths: list[int], deaths: set[int], publishes: int, pauses: int
) -> None:
    world = World(deaths)
    requests = [
        GenerationRequest([10 + number // 2, 11], Sampling(max_new_tokens=length), number, f"train:{number}@0 sample 0")
        for number, length in enumerate(lengths)
    ]
    results = asyncio.run(results_of(world, engines, requests, publishes, pauses))
    for request, result in zip(requests, results, strict=True):
        tokens, reason = reference(request)
        assert (result.token_ids.tolist(), result.finish_reason) == (tokens, reason)
        assert result.logprobs.tolist() == [-float(token) for token in tokens]
        # The last engine that wrote a token did so because the token of an earlier one was lost.
        written = [world.versions[request.name, 2 + index][-1] for index in range(len(tokens))]
        assert result.versions.tolist() == written
        assert result.routed_experts is not None
        assert result.routed_experts[:, 0, 0].tolist() == [*range(1 + len(tokens)), -1]
