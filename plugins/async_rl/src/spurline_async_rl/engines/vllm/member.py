"""One vLLM engine as a member of the pool, wherever it runs.

Place on the way: pool -> this -> engine on this machine or in a Ray actor -> tokens with their versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline.protocols.rollout_engine import GenerationRequest, Sampling, WeightBucket
from spurline.rl.trajectory import FinishReason
from spurline_async_rl.engines.member import EngineDiedError, Progress
from spurline_async_rl.engines.vllm.response import Delta, Response
from spurline_async_rl.weights.buckets import to_wire


class VllmHandle(Protocol):
    """An engine within reach; methods as of `AsyncEngine`, the rest known after `start`."""

    max_model_len: int
    vocabulary: int

    @property
    def where(self) -> str: ...
    async def start(self) -> None: ...
    def generate(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, seed: int, salt: str
    ) -> AsyncGenerator[Delta, None]: ...
    async def pause(self, *, clear_cache: bool) -> None: ...
    async def resume(self) -> None: ...
    async def begin_update(self) -> None: ...
    async def load_bucket(self, wire: Mapping[str, Any]) -> None: ...
    async def finish_update(self) -> None: ...
    async def wait_ended(self) -> str: ...
    async def close(self) -> None: ...


class VllmMember:
    """An `EngineMember`. A pause and an update may each hold the engine; it goes on when neither does."""

    def __init__(
        self,
        name: str,
        engine: VllmHandle,
        tokenizer: PreTrainedTokenizerBase,
        *,
        transports: Sequence[str],
        keeps_kv_cache: bool,
        rank_offset: int = 0,
    ):
        """rank_offset: number of workers of the engines before this one, for transports with a group of ranks."""
        self.name = name
        self.transports = transports
        self._engine = engine
        self._tokenizer = tokenizer
        self.keeps_kv_cache = keeps_kv_cache
        self._rank_offset = rank_offset
        self._version = 0
        self._holds: set[str] = set()
        self._released = asyncio.Event()
        self._released.set()
        self._request_ids = map(str, itertools.count())

    async def start(self) -> None:
        await self._engine.start()
        self.name = f"{self.name} ({self._engine.where})"

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        response = Response(
            request,
            progress,
            self._tokenizer,
            max_model_len=self._engine.max_model_len,
            vocabulary=self._engine.vocabulary,
        )
        if response.ended is not None:
            return response.ended
        while self._holds:
            await self._released.wait()
        # Prompts read by older weights are of no use to newer ones: the version keeps them apart.
        deltas = self._engine.generate(
            next(self._request_ids), response.prompt, response.sampling, response.seed, salt=str(self._version)
        )
        async with contextlib.aclosing(deltas):
            try:
                async for delta in deltas:
                    reason = response.add(delta, self._version)
                    if reason is not None:
                        return reason
            except DataError as error:
                raise DataError(f"{request.name}: {error}") from error
        raise EngineDiedError(f"{self.name} left a response without an end.")

    async def pause(self) -> None:
        self._hold("pause")
        await self._engine.pause(clear_cache=False)

    async def resume(self) -> None:
        await self._release("pause")

    async def begin_update(self, version: int) -> None:
        self._hold("update")
        await self._engine.pause(clear_cache=not self.keeps_kv_cache)
        await self._engine.begin_update()

    async def load_bucket(self, bucket: WeightBucket) -> None:
        wire = to_wire(bucket)
        init = wire["where"].get("init")
        if init is not None:
            wire["where"]["init"] = init | {"rank_offset": init["rank_offset"] + self._rank_offset}
        await self._engine.load_bucket(wire)

    async def finish_update(self, version: int) -> None:
        await self._engine.finish_update()
        self._version = version
        await self._release("update")

    async def wait_dead(self) -> str:
        return await self._engine.wait_ended()

    async def close(self) -> None:
        await self._engine.close()

    def _hold(self, why: str) -> None:
        self._holds.add(why)
        self._released.clear()

    async def _release(self, why: str) -> None:
        self._holds.discard(why)
        if not self._holds:
            await self._engine.resume()
            self._released.set()
