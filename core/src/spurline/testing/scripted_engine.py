"""A rollout engine without a model, for tests of environments: tokens by a rule, or random ones by the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from spurline.errors import DataError
from spurline.protocols.rollout_engine import GenerationRequest, GenerationResult

Script = Callable[[GenerationRequest], Sequence[int]]


class ScriptedEngine:
    """Answers every request with what `script` says, cut at the request's limit; equal requests get equal answers.

    context: longest prompt with response, as a model has one. requests: everything that was asked, in order.
    """

    def __init__(self, script: Script, *, context: int = 4096) -> None:
        self._script = script
        self._context = context
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        room = min(request.sampling.max_new_tokens, self._context - len(request.prompt_ids))
        if room < 1:
            raise DataError(f"{request.name}: no room for a response: the prompt has {len(request.prompt_ids)} tokens.")
        # A number of turns of the event loop that differs between requests, so that attempts overtake each other.
        for _ in range(request.seed % 5):
            await asyncio.sleep(0)
        answer = list(self._script(request))
        tokens = np.asarray(answer[:room], dtype=np.int32)
        logprobs = -np.random.default_rng(request.seed).random(len(tokens)).astype(np.float32)
        return GenerationResult(
            token_ids=tokens,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=np.zeros(len(tokens), dtype=np.int32),
            finish_reason="length" if len(answer) > room else "stop",
        )

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


def random_text(vocabulary: Sequence[int], end_token: int, longest: int = 20) -> Script:
    """A script of random tokens by the request's seed, with the end token last."""

    def script(request: GenerationRequest) -> list[int]:
        random = np.random.default_rng(request.seed)
        return [int(token) for token in random.choice(vocabulary, random.integers(0, longest))] + [end_token]

    return script
