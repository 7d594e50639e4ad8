"""One attempt as the server sees it: its turns, its conversations, the requests under way, and what went wrong.

Place on the way: request -> LiveSession -> policy handle of the attempt -> engine; at the end -> Trajectory. An API
without state sends the whole conversation each time. What the model wrote in it is found by its text and kept as the
tokens it wrote; messages that no turn of this session led to begin a conversation of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline_agents.bodies import ApiError
from spurline_agents.connections import Buffered
from spurline_agents.work import WorkQueue
from spurline_rl.chat_front import ChatFront
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle
from spurline_rl.protocols.rollout_engine import GenerationResult, Sampling
from spurline_rl.trajectory import Trajectory, Turn
from spurline_text.rows.messages import Message

_REFUSALS = 16
"""Requests over the limit of turns that an agent may still make before its attempt is ended."""


class Conversations:
    """All conversations that one policy handle has had."""

    def __init__(
        self,
        policy: PolicyHandle,
        tokenizer: PreTrainedTokenizerBase,
        history: Literal["exact", "retokenize"],
        where: str,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._history: Literal["exact", "retokenize"] = history
        self._where = where
        self._known: dict[bytes, ChatFront] = {}
        self.num_begun = 0
        """Requests that went on from no earlier turn."""

    def find(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> tuple[ChatFront, bytes]:
        """A conversation that ends with these messages, and the key that `remember` wants.

        Raises DataError for a tokenizer without chat template.
        """
        # The template shows the tools at the beginning, so that with others it is another conversation.
        key = _digest(b"", tools)
        known, start = None, 0
        for number, message in enumerate(messages):
            key = _digest(key, _identity(message))
            if key in self._known:
                known, start = self._known[key], number + 1
        if known is not None:
            chat = known.fork()
            chat.add(*messages[start:])
            return chat, key
        self.num_begun += 1
        chat = ChatFront(self._policy, self._tokenizer, messages, tools=tools, history=self._history, where=self._where)
        return chat, key

    def remember(self, key: bytes, message: Mapping[str, Any], chat: ChatFront) -> None:
        """`chat` has taken its turn, which the client is told as `message`."""
        self._known[_digest(key, _identity(message))] = chat


def _identity(message: Mapping[str, Any]) -> Any:
    """What has to be equal for two messages to be the same one.

    Clients leave out, add or rename much of an assistant message that they send back, and some strip white space.
    """
    if message["role"] != "assistant":
        return message
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    content = (message.get("content") or "").strip()
    return ["assistant", content, [[call["name"], call["arguments"]] for call in calls]]


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


class DeliveredPolicy:
    """A PolicyHandle that leaves out the turns which no client has received, such as those of one that hung up."""

    def __init__(self, policy: PolicyHandle) -> None:
        self._policy = policy
        self.sampling = policy.sampling
        # By number of asking, which is the order of `policy.turns`; None until the answer is there.
        self._results: list[GenerationResult | None] = []
        # By `id` of the result, both.
        self._prompts: dict[int, Sequence[int]] = {}
        self._delivered: set[int] = set()

    @property
    def turns(self) -> tuple[Turn, ...]:
        written = [result for result in self._results if result is not None]
        return tuple(
            turn for result, turn in zip(written, self._policy.turns, strict=True) if id(result) in self._delivered
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> GenerationResult:
        """Ask the policy for its next turn. Raises ApiError when the context is full."""
        number = len(self._results)
        self._results.append(None)
        try:
            result = await self._policy.generate(prompt_ids, sampling)
        except DataError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        self._results[number] = result
        self._prompts[id(result)] = prompt_ids
        return result

    def prompt_of(self, result: GenerationResult) -> Sequence[int]:
        """The tokens that this was the answer to."""
        return self._prompts[id(result)]

    def deliver(self, results: Iterable[GenerationResult]) -> None:
        """A client has received these."""
        self._delivered |= {id(result) for result in results}

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
    """The attempt's state on one event loop, from the agent's start to its end.

    work: what its requests have to be done. buffered: what is held of them.
    """

    def __init__(
        self,
        policy: PolicyHandle,
        tokenizer: PreTrainedTokenizerBase,
        *,
        history: Literal["exact", "retokenize"],
        max_turns: int,
        where: str,
        work: WorkQueue,
        buffered: Buffered,
    ) -> None:
        self.work = work
        self.num_receiving = 0
        """Requests whose body is on its way."""
        self.buffered = buffered
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
