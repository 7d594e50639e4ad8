"""Keep the state of one attempt on the server: its turns, its conversations, its running requests, and its failure.

The APIs have no state, except for the ids of responses: each request has the whole conversation. If it begins with the
text of a conversation that the session knows, the tokens that the model generated are reused. Otherwise, a new
conversation begins.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline_agents.bodies import ApiError
from spurline_agents.configs import EndpointConfig
from spurline_environments.grammars import ToolCall
from spurline_environments.tool_formats import Turns, call_metrics
from spurline_rl.chat_front import ChatFront
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle
from spurline_rl.protocols.reward import Answer
from spurline_rl.protocols.rollout_engine import GenerationResult, Sampling
from spurline_rl.trajectory import Trajectory, Turn
from spurline_text.rows.messages import Message

T = TypeVar("T")

SMALL_BYTES = 16 * 1024
"""Requests up to this size are read on the event loop. That takes a few milliseconds; a thread would not be faster."""
_MOST_BODIES = 4
"""Maximum number of request bodies of one session in memory. Further requests wait."""
_REFUSALS = 16
"""Number of requests beyond `max_turns` that are only refused. The next one ends the attempt with an error."""


def _identity(message: Mapping[str, Any]) -> Any:
    """Return the parts of a message by which it is recognized.

    Clients change other parts of an assistant message when they send it back, and some strip white space.
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
    """A PolicyHandle that leaves out turns that no client has received, for example because the client disconnected."""

    def __init__(self, policy: PolicyHandle) -> None:
        self._policy = policy
        self.sampling = policy.sampling
        # The results in the order of the requests, like `policy.turns`. An entry is None until its result comes.
        self._results: list[GenerationResult | None] = []
        self._delivered: set[int] = set()

    @property
    def turns(self) -> tuple[Turn, ...]:
        written = [result for result in self._results if result is not None]
        return tuple(
            turn for result, turn in zip(written, self._policy.turns, strict=True) if id(result) in self._delivered
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> GenerationResult:
        """Ask the policy for its next turn. Raises ApiError if the context is full."""
        number = len(self._results)
        self._results.append(None)
        try:
            result = await self._policy.generate(prompt_ids, sampling)
        except DataError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        self._results[number] = result
        return result

    def deliver(self, results: Iterable[GenerationResult]) -> None:
        """Record that a client has received these results."""
        self._delivered |= {id(result) for result in results}

    def finish(
        self,
        rewards: Mapping[str, float] | None = None,
        *,
        turn_rewards: Sequence[float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        assert turn_rewards is None, "an agent gives no rewards of single turns"
        return replace(self._policy.finish(rewards, info=info), turns=self.turns)


class LiveSession:
    """The state of one attempt on one event loop, from the agent's start to its end.

    `where` names the attempt in messages. `threads` read large requests. `turns` reads the model's turns.
    """

    def __init__(
        self,
        policy: PolicyHandle,
        tokenizer: PreTrainedTokenizerBase,
        config: EndpointConfig,
        where: str,
        threads: ThreadPoolExecutor,
        turns: Turns,
    ) -> None:
        self.policy = DeliveredPolicy(policy)
        self.where = where
        self.key = secrets.token_urlsafe(32)
        """The API key, which is valid for this attempt alone."""
        self.forwarded: set[str] = set()
        """Keys under which a proxy sends requests of this attempt."""
        self.num_conversations = 0
        """Conversations that the agent has begun."""
        self.last_chat: ChatFront | None = None
        """The conversation to which the model's latest turn belongs."""
        self.answers: dict[str, tuple[list[Message], list[dict[str, Any]] | None]] = {}
        """The messages up to and with an answer, and the tools, by the answer's id."""
        self.bodies = asyncio.Semaphore(_MOST_BODIES)
        """Limits the number of request bodies that are in memory at a time."""
        self.calls: set[asyncio.Future[Any]] = set()
        """The requests that are under way."""
        self.failed = asyncio.Event()
        self.failure: Exception | None = None
        """The error that ends the attempt."""
        self.tool_calls: list[ToolCall] = []
        """All calls that the model has written."""
        self.num_forked = 0
        """How often a conversation forked."""
        self._turns = turns
        self._tokenizer = tokenizer
        self._config = config
        self._threads = threads
        self._work = asyncio.Lock()
        self._known: dict[bytes, ChatFront] = {}
        """Conversations that end with a turn of the model, by the digest of their messages."""
        self._num_turns = 0
        self._num_refused = 0

    async def work(self, num_bytes: int, function: Callable[[], T]) -> T:
        """Return the result of the function, which runs on a thread if `num_bytes` is large.

        The functions of one session run one at a time, in the order of the calls. So an agent with many large requests
        slows only itself, and the order of its turns does not depend on threads.
        """
        async with self._work:
            if num_bytes <= SMALL_BYTES:
                return function()
            working = asyncio.get_running_loop().run_in_executor(self._threads, function)
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                # The thread cannot be stopped. Waiting for it keeps the session from using a second thread.
                await asyncio.wait([working])
                raise

    def find(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, begins: bool = True
    ) -> tuple[ChatFront, bytes]:
        """Return a conversation that ends with these messages, and its key for `remember`.

        If it is not known, it counts as begun, unless `begins` is false.

        Raises:
            DataError: If the tokenizer has no chat template.
        """
        # The template shows the tools at the beginning, so a request with other tools begins another conversation.
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
        self.num_conversations += begins
        history, agree = self._config.history, partial(self._turns.agree, tools=tools or ())
        chat = ChatFront(
            self.policy, self._tokenizer, messages, tools=tools, history=history, where=self.where, agree=agree
        )
        return chat, key

    def answer(
        self, row: Mapping[str, Any], reference: str | None = None, response: str | None = None
    ) -> tuple[Answer, dict[str, Any]]:
        """Return the answer (by default the last turn) and its `info`. Raises AttemptFailedError without a turn."""
        turns, decode = self.policy.turns, self._tokenizer.decode
        if not turns:
            raise AttemptFailedError(
                f"{self.where}: the agent has ended without an answer from the model, so there is nothing to train on. "
                "Check that it uses the base_url and the api_key that it gets."
            )
        prompt = str(decode(turns[0].prompt_ids.tolist(), skip_special_tokens=False))
        if response is None:
            response = str(decode(turns[-1].response_ids.tolist(), skip_special_tokens=True))
        messages = list(self.last_chat.messages) if self.last_chat is not None else []
        said = {"prompt": prompt, "response": response, "reference": reference, "messages": messages}
        metrics = {**call_metrics(self.tool_calls), "turns/forked": self.num_forked}
        info = {**said, "turns": len(turns), "conversations": self.num_conversations, "metrics": metrics}
        return Answer(prompt, response, reference, row, messages), info

    def remember(self, key: bytes, message: Mapping[str, Any], chat: ChatFront) -> None:
        """Remember `chat`, whose last turn is from the model. The client gets this turn as `message`."""
        self._known[_digest(key, _identity(message))] = chat

    def take_turns(self, count: int) -> None:
        """Count the turns that a request asks for.

        Raises:
            ApiError: If the attempt has fewer turns left.
            AttemptFailedError: If the agent was refused too often.
        """
        most = self._config.max_turns
        if self._num_turns + count <= most:
            self._num_turns += count
            return
        self._num_refused += 1
        text = (
            f"{self.where}: the request asks for {count} turns, but the attempt has already taken {self._num_turns} "
            f"of its {most} turns (environment.max_turns)."
        )
        if self._num_refused > _REFUSALS:
            raise AttemptFailedError(f"{text} The agent was already refused {_REFUSALS} times.")
        raise ApiError(429, text, code="max_turns")

    def fail(self, error: Exception) -> None:
        """End the attempt with this error. Later errors are ignored."""
        self.failure = self.failure or error
        self.failed.set()
