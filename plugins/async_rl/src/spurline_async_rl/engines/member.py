"""One engine of a pool, as the pool sees it.

Place on the way: pool -> member (a child process, a vLLM engine, an actor, a server) -> tokens. A member knows nothing
of other members, of routing or of retries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spurline.errors import RunFailedError
from spurline.protocols.rollout_engine import GenerationRequest, WeightBucket
from spurline.rl.trajectory import FinishReason


class EngineDiedError(RunFailedError):
    """An engine generates no further token; the text says which one and how it ended."""


@dataclass
class Progress:
    """What has come of one response so far. The member adds to it while it generates, so that it survives the member.

    All have the same length; only raw_logprobs stays shorter where an engine cannot tell them. Fields as of
    GenerationResult.
    """

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    raw_logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


class EngineMember(Protocol):
    """One engine. All coroutines are awaited on one event loop; the pool sets the time limits and cancels."""

    name: str
    """For messages: `engine 0 (process 4711)`."""
    transports: Sequence[str]
    """As of `TakesWeights`."""

    async def start(self) -> None:
        """Return when it could generate. Raises EngineDiedError when it cannot start."""
        ...

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        """Generate, adding every token to `progress` as it comes. Cancelling it aborts the request in the engine.

        Raises DataError for a request the model cannot answer, EngineDiedError when the engine ended.
        """
        ...

    async def pause(self) -> None:
        """Stop between two tokens. When it returns every token generated so far is in its Progress."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def begin_update(self, version: int) -> None:
        """As of `TakesWeights`, as are the next two; any error there is fatal for the engine."""
        ...

    async def load_bucket(self, bucket: WeightBucket) -> None: ...

    async def finish_update(self, version: int) -> None: ...

    async def wait_dead(self) -> str:
        """Return when the engine has ended by itself, with what is known about why, such as the end of its log."""
        ...

    async def close(self) -> None:
        """End its processes; killed when they do not end by themselves. May be called at any time, and again."""
        ...
