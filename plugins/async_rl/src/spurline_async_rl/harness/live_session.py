"""One attempt as the server sees it: its turns, its conversations, the requests under way, and what went wrong.

Place on the way: request -> LiveSession -> policy handle of the attempt -> engine; at the end -> Trajectory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline.protocols.environment import AttemptFailedError, PolicyHandle
from spurline.protocols.rollout_engine import GenerationResult, Sampling
from spurline.rl.chat_front import ChatFront
from spurline.rl.trajectory import Trajectory, Turn
from spurline_async_rl.harness.api_errors import ApiError
from spurline_async_rl.harness.conversations import Conversations

_REFUSALS = 16
"""Requests over the limit of turns that an agent may still make before its attempt is ended."""


class DeliveredPolicy:
    """A PolicyHandle that leaves out the turns which no client has received, such as those of one that hung up."""

    def __init__(self, policy: PolicyHandle) -> None:
        self._policy = policy
        self.sampling = policy.sampling
        self._num_asked = 0
        # By number of asking, which is the order of `policy.turns`.
        self._written: dict[int, tuple[GenerationResult, Sequence[int]]] = {}
        self._delivered: set[int] = set()

    @property
    def turns(self) -> tuple[Turn, ...]:
        numbers = sorted(self._written)
        return tuple(
            turn for number, turn in zip(numbers, self._policy.turns, strict=True) if number in self._delivered
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> GenerationResult:
        """As any policy; ApiError when the context is full."""
        number = self._num_asked
        self._num_asked += 1
        try:
            result = await self._policy.generate(prompt_ids, sampling)
        except DataError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        self._written[number] = result, prompt_ids
        return result

    def prompt_of(self, result: GenerationResult) -> Sequence[int]:
        """The tokens that this was the answer to."""
        return next(prompt for written, prompt in self._written.values() if written is result)

    def deliver(self, results: Iterable[GenerationResult]) -> None:
        """A client has received these."""
        received = {id(result) for result in results}
        self._delivered |= {number for number, (result, _) in self._written.items() if id(result) in received}

    def finish(
        self,
        rewards: Mapping[str, float] | None = None,
        *,
        turn_rewards: Sequence[float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        assert turn_rewards is None, "an agent does not know turns"
        return replace(self._policy.finish(rewards, info=info), turns=self.turns)


class LiveSession:
    """See the module. Lives on one event loop, from the agent's start to its end."""

    def __init__(
        self,
        policy: PolicyHandle,
        tokenizer: PreTrainedTokenizerBase,
        *,
        history: Literal["exact", "retokenize"],
        max_turns: int,
        where: str,
    ) -> None:
        self.policy = DeliveredPolicy(policy)
        self.conversations = Conversations(self.policy, tokenizer, history, where)
        self.where = where
        self.last_chat: ChatFront | None = None
        """The conversation that the model took its last turn in."""
        self.calls: set[asyncio.Future[Any]] = set()
        """What is being generated."""
        self.is_over = False
        """Its requests are refused from now on."""
        self.failed = asyncio.Event()
        self.failure: Exception | None = None
        """Why the attempt cannot go on, whatever its agent makes of it."""
        self._max_turns = max_turns
        self._num_turns = 0
        self._num_refused = 0

    def take_turns(self, count: int) -> None:
        """A request asks for so many turns. Raises ApiError when these are too many."""
        if self._num_turns + count <= self._max_turns:
            self._num_turns += count
            return
        self._num_refused += 1
        text = (
            f"{self.where}: the attempt may take {self._max_turns} turns (environment.max_turns), of which "
            f"{self._num_turns} are taken, and {count} more are asked for."
        )
        if self._num_refused > _REFUSALS:
            self.fail(AttemptFailedError(f"{text} The agent has asked again {_REFUSALS} times."))
        raise ApiError(429, text, code="max_turns")

    def fail(self, error: Exception) -> None:
        """End the attempt with this error; the first one counts."""
        self.failure = self.failure or error
        self.failed.set()
