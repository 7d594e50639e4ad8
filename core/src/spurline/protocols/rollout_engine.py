"""Kind `rollout_engine`: generate tokens from the current weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from spurline.rl.trajectory import FinishReason


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0 is greedy. stop_token_ids end the response and belong to it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation to generate. seed: derived from (run, epoch, uid, sample, turn)."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class GenerationResult:
    """token_ids int32 [A]; logprobs float32 [A] of the distribution sampled from; versions int32 [A]."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason


class RolloutEngine(Protocol):
    """Generate continuations.

    Factory: `Class(config, run=RunConfig)`. Every method has a time limit and says what it waited for.
    """

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """One continuation; concurrent calls are batched."""
        ...

    async def pause(self) -> None:
        """Stop between two tokens; requests in flight wait."""
        ...

    async def resume(self) -> None:
        """Go on with the current weights."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
