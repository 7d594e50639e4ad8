"""Run a vLLM engine, on this machine or in a Ray actor, as a member of the pool."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline_async_rl.engines.commands import Command, FinishUpdate
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.response import Delta, Progress, Response
from spurline_rl.engines.in_process.response import check_request
from spurline_rl.protocols.rollout_engine import GenerationRequest
from spurline_rl.trajectory import FinishReason

if TYPE_CHECKING:
    from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
    from spurline_async_rl.engines.vllm.ray import RayEngine

_SEED_BITS = 0x7FFF_FFFF_FFFF_FFFF
"""vLLM takes seeds below 2**63."""


class VllmResponse(Response):
    """A response of vLLM.

    Stop texts are found here, not by vLLM, so a response ends at the same token as with engine `in_process`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_model_len: int,
        vocabulary: int | None = None,
    ):
        """Raise DataError if the prompt is too long, or has tokens outside the vocabulary."""
        check_request(request)
        prompt: list[int] = np.asarray(request.prompt_ids, np.int64).tolist()
        if len(prompt) >= max_model_len:
            raise DataError(
                f"{request.name}: the prompt has {len(prompt)} tokens, and the engine's context of {max_model_len} "
                "holds prompt and response. Shorten the prompt, or raise max_model_len and kv_cache_gb where the model "
                "allows it."
            )
        for token in (min(prompt), max(prompt)):
            if token < 0 or (vocabulary and token >= vocabulary):
                raise DataError(
                    f"{request.name}: the prompt has token {token}, but the model knows only tokens from 0 to "
                    f"{(vocabulary or 0) - 1}. Does the tokenizer belong to another model?"
                )
        asked, eos = request.sampling, tokenizer.eos_token_id
        sampling = replace(
            asked,
            max_new_tokens=min(asked.max_new_tokens, max_model_len - len(prompt)),
            stop_token_ids=(*asked.stop_token_ids, *([eos] if isinstance(eos, int) else [])),
        )
        known = replace(request, prompt_ids=prompt, sampling=sampling, seed=request.seed & _SEED_BITS)
        super().__init__(known, tokenizer, progress, finds_stop_texts=True)
        self._is_raw = asked.temperature == 0 or (asked.temperature == 1 and asked.top_p == 1 and asked.top_k == 0)

    def add_delta(self, delta: Delta, version: int) -> FinishReason | None:
        """Add the next tokens, and return the finish reason if the response is complete."""
        part = Progress()
        part.add(delta.token_ids, delta.logprobs, delta.logprobs if self._is_raw else None, version)
        if delta.experts is not None:
            self._so_far.experts.add(delta.experts_start, delta.experts)
        return self.add(part, delta.finish_reason)


class Gate:
    """A gate that requests can pass while no hold has shut it."""

    def __init__(self) -> None:
        self.holds: set[str] = set()
        self._opened = asyncio.Event()

    def shut(self, hold: str) -> None:
        self.holds.add(hold)
        self._opened.clear()

    def open(self, hold: str) -> None:
        self.holds.discard(hold)
        if not self.holds:
            self._opened.set()

    async def wait(self) -> None:
        while self.holds:
            await self._opened.wait()


class VllmMember:
    """An `EngineMember`. Its engine generates only if there is no hold."""

    def __init__(self, name: str, engine: AsyncEngine | RayEngine, tokenizer: PreTrainedTokenizerBase):
        self.name = name
        self.num_workers = engine.num_workers
        self.weights_dtype: str | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._version = 0
        self._gate = Gate()
        self._request_ids = map(str, itertools.count())

    async def start(self) -> None:
        await self._engine.start()
        self.weights_dtype = self._engine.weights_dtype
        self.name = f"{self.name} ({self._engine.where})"

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        engine = self._engine
        response = VllmResponse(
            request, progress, self._tokenizer, max_model_len=engine.max_model_len, vocabulary=engine.vocabulary
        )
        if response.ended is not None:
            return response.ended
        await self._gate.wait()
        # With this salt, vLLM does not reuse prompts that were computed with other weights.
        number, salt, each_step = next(self._request_ids), str(self._version), bool(request.sampling.stop)
        deltas = engine.generate(number, response.rest(), salt, each_step=each_step)
        async with contextlib.aclosing(deltas):
            try:
                async for delta in deltas:
                    reason = response.add_delta(delta, self._version)
                    if reason is not None:
                        return reason
            except DataError as error:
                raise DataError(f"{request.name}: {error}") from error
        raise EngineDiedError(f"{self.name} left a response without an end.")

    async def control(self, command: Command) -> None:
        if command.begins:
            self._gate.shut(command.hold)
        if isinstance(command, FinishUpdate):
            # The engine may generate tokens of this version as soon as it gets the command.
            self._version = command.version
        await self._engine.control(command)
        if command.ends:
            self._gate.open(command.hold)

    async def wait_dead(self) -> str:
        return await self._engine.wait_ended()

    async def close(self) -> None:
        await self._engine.close()
