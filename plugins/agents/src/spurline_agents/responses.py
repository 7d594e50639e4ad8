"""Let the model answer a request of any API. What is recorded does not depend on the API.

A module per API (`Dialect`) translates requests into messages and tools as chat completions have them, and choices
into its own JSON. A stream begins only when the turn is finished, so that an error before that can still set the HTTP
status.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import PrivateAttr
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError, PluginError
from spurline_agents.agents import CANCEL_TIMEOUT_S
from spurline_agents.bodies import ApiError, Body, BodyT, Tools, read_body, sampling_error, sampling_of
from spurline_agents.configs import EndpointConfig
from spurline_agents.sessions import LiveSession
from spurline_concurrency.calls import all_or_none
from spurline_environments.grammars import ToolCall
from spurline_environments.tool_formats import Turns, as_openai
from spurline_rl.chat_front import ChatFront, PrefixError, Reply
from spurline_rl.protocols.rollout_engine import GenerationResult, Sampling
from spurline_text.rows.messages import Message, read_messages
from spurline_text.rows.rows import BadRowError

T = TypeVar("T")

MODEL_NAME = "policy"
"""The name of the only model in `/v1/models`. Requests may give any model name."""
_LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express. vLLM's server does the same."""


@dataclass(frozen=True)
class Choice:
    """One answer of the model.

    Attributes:
        text: The answer without end token, special tokens and stop text.
        finish_reason: `stop`, `length` or `tool_calls`.
        result: The tokens and logprobs of the answer, for training.
        prompt_ids: The tokens of the prompt.
        tool_calls: The tool calls in OpenAI's format.
        reasoning: The model's reasoning before the answer.
    """

    text: str
    finish_reason: str
    result: GenerationResult
    prompt_ids: Sequence[int]
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str | None = None

    def message(self) -> dict[str, Any]:
        """Return the choice as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message | ({"content": self.text or None, "tool_calls": [*self.tool_calls]} if self.tool_calls else {})


Generate = Callable[[], Awaitable[list[Choice]]]
Conversation = tuple[list[Message], list[dict[str, Any]] | None]
"""Messages and tools."""


class ConversationBody(Body):
    """A request that has a whole conversation, in the words of its API."""

    tools: Tools = []
    tool_choice: Any = "auto"
    _so_far: Conversation = PrivateAttr(([], None))

    def conversation(self, session: LiveSession) -> Conversation:
        """Return the messages and the tools as chat completions have them. Raises ApiError or BadRowError."""
        raise NotImplementedError

    def goes_on_from(self, session: LiveSession, answer: Any, field: str) -> Conversation:
        """Return the conversation up to and with the answer of this id. Raises ApiError if there is none."""
        if not isinstance(answer, str) or answer not in session.answers:
            text = f"{field}: this attempt has received no answer with this id that can be continued."
            raise ApiError(400, text, param=field, code="previous_response_not_found")
        return session.answers[answer]

    def keep(self, session: LiveSession, answer: str, choice: Choice) -> None:
        """Let later requests of the session go on from this choice, by the id of its answer."""
        messages, tools = self._so_far
        session.answers[answer] = [*messages, *read_messages([choice.message()], "answer")], tools


class Dialect(Generic[BodyT]):
    """One API of the endpoint, by default one for conversations, whose streams have events with types."""

    kind: type[BodyT]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: EndpointConfig, turns: Turns) -> None:
        self.config = config
        self._turns = turns
        self.tokenizer = tokenizer

    def read(self, session: LiveSession, raw: bytes) -> tuple[BodyT, Generate]:
        """Read a request, count its turns and encode its prompt. Return a function that generates the choices.

        This may run on a thread, because a large prompt takes long. Raises ApiError, PrefixError or AttemptFailedError.
        """
        body = read_body(raw, self.kind, self.config)
        assert isinstance(body, ConversationBody)
        with errors_as_api_errors():
            messages, tools = body.conversation(session)
        session.take_turns(body.n)
        with errors_as_api_errors():
            chat, key = session.find(messages, tools)
            before = chat.num_forked
            prompt = chat.open_turn()
            session.num_forked += chat.num_forked - before
            branches = [chat.fork() for _ in range(body.n)]

        async def generate() -> list[Choice]:
            replies = await self.ask(
                session, body, lambda sampling: [branch.reply(self._turns.sampling(sampling)) for branch in branches]
            )
            asked = tools if body.tool_choice not in ("none", {"type": "none"}) else None
            choices = [
                self._choice(session, body, prompt, branch, reply, asked or [])
                for branch, reply in zip(branches, replies, strict=True)
            ]
            for branch, choice in zip(branches, choices, strict=True):
                [message] = read_messages([choice.message()], "message")
                session.remember(key, message, branch)
            session.last_chat = branches[-1]
            return choices

        return body, generate

    def write(self, session: LiveSession, body: BodyT, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        raise NotImplementedError

    def events(self, body: BodyT, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the parts of a stream that brings this answer."""
        raise NotImplementedError

    def stream(self, body: BodyT, answer: dict[str, Any]) -> list[bytes]:
        """Return the parts as server-sent events."""
        return [f"event: {part['type']}\ndata: {json.dumps(part)}\n\n".encode() for part in self.events(body, answer)]

    async def ask(
        self, session: LiveSession, body: Body, begin: Callable[[Sampling], list[Coroutine[Any, Any, T]]]
    ) -> list[T]:
        """Generate all turns of a request, or none."""
        run = session.policy.sampling
        sampling = sampling_of(body, run, ignore_sampling=self.config.ignore_sampling)
        try:
            return await all_or_none(begin(sampling), session.where, CANCEL_TIMEOUT_S)
        except PluginError as error:
            # The policy refuses settings that it cannot train on. If the request made them, the client gets the error.
            for name in ("temperature", "top_p", "top_k"):
                if getattr(sampling, name) != getattr(run, name):
                    own = f"samples with {getattr(run, name):g}"
                    raise sampling_error(name, f"{getattr(sampling, name):g}", own) from error
            raise

    def _choice(
        self,
        session: LiveSession,
        body: Body,
        prompt: Sequence[int],
        chat: ChatFront,
        reply: Reply,
        tools: list[dict[str, Any]],
    ) -> Choice:
        """Return the turn as the client gets it, and restate it in the conversation as the template takes it."""
        result = reply.result
        turn = self._turns.read(reply.text, tools, len(chat.messages))
        is_cut = result.finish_reason == "length"
        session.tool_calls += [call for call in turn.calls if tools and not (is_cut and call.problem)]
        # The agent gets the whole answer as text if one call is malformed, or could not be sent back.
        if turn.calls and (not tools or any(call.problem or not _can_come_back(call) for call in turn.calls)):
            text, _ = self.text(result, body)
            chat.restate({"role": "assistant", "content": text})
            return Choice(text, result.finish_reason, result, prompt)
        chat.restate(self._turns.message(reply.text, turn))
        text, _ = self.text(result, body, None if turn.content == reply.text else turn.content)
        finish_reason = "tool_calls" if turn.calls and result.finish_reason == "stop" else result.finish_reason
        return Choice(text, finish_reason, result, prompt, tuple(map(as_openai, turn.calls)), turn.reasoning)

    def text(self, result: GenerationResult, body: Body, content: str | None = None) -> tuple[str, str | None]:
        """Return the content of a turn, by default all of it, and the stop text that has ended it, if one has."""
        text = content
        if text is None:
            text = str(self.tokenizer.decode(result.token_ids.tolist(), skip_special_tokens=True))
        stops = [stop for stop in body.stop if stop and stop in text] if result.finish_reason == "stop" else []
        first = min(stops, key=text.find, default=None)
        return text if first is None else text[: text.find(first)], first

    def tokens(self, choice: Choice) -> list[tuple[str, float]]:
        """Return the text of each token, and its logprob under the distribution that it was sampled from."""
        texts = [str(self.tokenizer.decode([token])) for token in choice.result.token_ids.tolist()]
        logprobs = [max(value, _LOWEST_LOGPROB) for value in choice.result.logprobs.tolist()]
        return list(zip(texts, logprobs, strict=True))


@contextmanager
def errors_as_api_errors() -> Generator[None, None, None]:
    """Turn errors of messages and of the chat template into ApiError."""
    try:
        yield
    except PrefixError:
        raise
    except BadRowError as error:
        raise ApiError(400, str(error), param=error.field) from error
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from error
    except RecursionError as error:
        raise ApiError(400, "messages: nested too deeply.", param="messages") from error


def _can_come_back(call: ToolCall) -> bool:
    """Return whether `read_body` accepts a request with this call: no half surrogate pairs, NaN or too many levels."""
    try:
        # A request adds up to eight levels.
        from_json(f"{'[' * 8}{json.dumps([call.name, dict(call.arguments)])}{']' * 8}", allow_inf_nan=False)
    except (ValueError, RecursionError):
        return False
    return True
