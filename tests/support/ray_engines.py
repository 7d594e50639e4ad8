"""Engines in actors of a Ray cluster that need no vLLM: each gives the token 7 again and again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator

from spurline_async_rl.engines.commands import Command
from spurline_async_rl.engines.response import Delta
from spurline_async_rl.engines.vllm.launch import EngineSpec
from spurline_async_rl.engines.vllm.ray import EngineActor
from spurline_rl.protocols.rollout_engine import GenerationRequest

TOKEN_S = 0.02
"""Seconds of one token."""


class ScriptedActor(EngineActor):
    """An `EngineActor` in whose place nothing else changes."""

    def __init__(self, spec: EngineSpec, log: str | None):
        super().__init__(spec, log)
        self._engine = _Scripted()  # pyright: ignore[reportAttributeAccessIssue]


class _Scripted:
    max_model_len, vocabulary, weights_dtype = 4096, 100, "float32"

    def __init__(self) -> None:
        self._holds: set[str] = set()

    @property
    def where(self) -> str:
        return f"process {os.getpid()}"

    async def start(self) -> None:
        print(f"{os.getpid()} says that it starts", file=sys.stderr, flush=True)

    async def generate(
        self, request_id: str, request: GenerationRequest, salt: str, *, each_step: bool = False
    ) -> AsyncGenerator[Delta, None]:
        for number in range(request.sampling.max_new_tokens):
            await asyncio.sleep(TOKEN_S)
            while self._holds:
                await asyncio.sleep(TOKEN_S)
            yield Delta([7], [-0.5], "length" if number + 1 == request.sampling.max_new_tokens else None)

    async def control(self, command: Command) -> None:
        if command.begins:
            self._holds.add(command.hold)
        if command.ends:
            self._holds.discard(command.hold)

    async def wait_ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def close(self) -> None:
        pass
