"""Let the model answer a request, and write the answer as OpenAI's API does: one JSON object, or a stream of chunks.

A stream begins only when the turn is finished, so that an error before that can still set the HTTP status. `token_ids`
and `prompt_token_ids` are in the same JSON objects as in answers of vLLM's server.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError, PluginError
from spurline_agents.agents import CANCEL_TIMEOUT_S
from spurline_agents.bodies import ApiError, Body, ChatBody, CompletionBody, read_body, sampling_error, sampling_of
from spurline_agents.configs import HarnessConfig
from spurline_agents.sessions import LiveSession
from spurline_concurrency.calls import all_or_none
from spurline_environments.tools import ToolCall, parse_calls
from spurline_rl.chat_front import PrefixError, Reply
from spurline_rl.protocols.rollout_engine import GenerationResult, Sampling
from spurline_text.prompts import encode_prompt
from spurline_text.rows.messages import read_messages, read_tools
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
    """

    text: str
    finish_reason: str
    result: GenerationResult
    prompt_ids: Sequence[int]
    tool_calls: tuple[dict[str, Any], ...] = ()

    def message(self) -> dict[str, Any]:
        """Return the choice as a message of the conversation."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": self.text or None, "tool_calls": list(self.tool_calls)}


Generate = Callable[[], Awaitable[list[Choice]]]


class Answering:
    """Answers requests of any session.

    `read_chat` and `read_completion` read a request, count its turns and encode its prompt. They may run on a thread,
    because a large prompt takes long. They return the body, and a function that generates the choices. `write_chat` and
    `write_completion` return the choices as a JSON object.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: HarnessConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._vocabulary = len(tokenizer)

    def read_chat(self, session: LiveSession, raw: bytes) -> tuple[ChatBody, Generate]:
        """Prepare `n` turns of a conversation. Raises ApiError, PrefixError, or AttemptFailedError."""
        body = read_body(raw, ChatBody, self._config)
        with _errors_as_api_errors():
            messages, tools = read_messages(body.messages, "messages"), read_tools(body.tools, "tools")
        session.take_turns(body.n)
        with _errors_as_api_errors():
            chat, key = session.find(messages, tools)
            prompt = chat.open_turn()
            branches = [chat.fork() for _ in range(body.n)]

        async def generate() -> list[Choice]:
            replies = await self._ask(session, body, lambda sampling: [branch.reply(sampling) for branch in branches])
            choices = [self._choice(body, prompt, reply) for reply in replies]
            for branch, choice in zip(branches, choices, strict=True):
                [message] = read_messages([choice.message()], "message")
                session.remember(key, message, branch)
            session.last_chat = branches[-1]
            return choices

        return body, generate

    def read_completion(self, session: LiveSession, raw: bytes) -> tuple[CompletionBody, Generate]:
        """Prepare `n` continuations of each prompt. Raises ApiError or AttemptFailedError."""
        body = read_body(raw, CompletionBody, self._config)
        prompts = body.prompts
        session.take_turns(body.n * len(prompts))
        asked = [encoded for prompt in prompts for encoded in [self._encode(prompt)] * body.n]

        async def generate() -> list[Choice]:
            results = await self._ask(
                session, body, lambda sampling: [session.policy.generate(prompt, sampling) for prompt in asked]
            )
            return [
                Choice(self._text(result, body), result.finish_reason, result, prompt)
                for prompt, result in zip(asked, results, strict=True)
            ]

        return body, generate

    async def _ask(
        self, session: LiveSession, body: Body, begin: Callable[[Sampling], list[Coroutine[Any, Any, T]]]
    ) -> list[T]:
        """Generate all turns of a request, or none."""
        run = session.policy.sampling
        sampling = sampling_of(body, run, ignore_sampling=self._config.ignore_sampling)
        try:
            return await all_or_none(begin(sampling), session.where, CANCEL_TIMEOUT_S)
        except PluginError as error:
            # The policy refuses settings that it cannot train on. If the request made them, the client gets the error.
            for name in ("temperature", "top_p", "top_k"):
                if getattr(sampling, name) != getattr(run, name):
                    own = f"samples with {getattr(run, name):g}"
                    raise sampling_error(name, f"{getattr(sampling, name):g}", own) from error
            raise

    def _choice(self, body: ChatBody, prompt: Sequence[int], reply: Reply) -> Choice:
        result = reply.result
        calls = parse_calls(reply.text) if body.tools and body.tool_choice != "none" else []
        # The agent gets the whole answer as text if one call is malformed, or has half of a surrogate pair in its name,
        # which no client can send back.
        if not calls or any(call.problem or not call.name.isprintable() for call in calls):
            return Choice(self._text(result, body), result.finish_reason, result, prompt)
        finish_reason = "tool_calls" if result.finish_reason == "stop" else result.finish_reason
        before = reply.text.partition("<tool_call>")[0].strip()
        return Choice(before, finish_reason, result, prompt, tuple(map(_as_openai, calls)))

    def _text(self, result: GenerationResult, body: Body) -> str:
        text = str(self._tokenizer.decode(result.token_ids.tolist(), skip_special_tokens=True))
        if result.finish_reason != "stop":
            return text
        ends = [text.find(stop) for stop in body.stops if stop and stop in text]
        return text[: min(ends)] if ends else text

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            bad = next((token for token in (min(prompt), max(prompt)) if not 0 <= token < self._vocabulary), None)
            if bad is not None:
                text = f"prompt: {bad} is not the id of a token. The tokenizer has {self._vocabulary} tokens."
                raise ApiError(400, text, param="prompt")
            return prompt
        return encode_prompt(self._tokenizer, prompt, is_chat=False)

    def write_chat(self, body: ChatBody, choices: Sequence[Choice]) -> dict[str, Any]:
        written: list[dict[str, Any]] = []
        for choice in choices:
            logprobs = None
            if body.logprobs:
                entries = [
                    {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
                    for text, logprob in self._tokens(choice)
                ]
                # The engine reports only the logprob of the sampled token.
                logprobs = {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}
            written.append({"message": {"refusal": None, **choice.message()}, "logprobs": logprobs})
        prompt_ids = {"prompt_token_ids": list(choices[0].prompt_ids)} if body.return_token_ids else {}
        return {**_completion("chat.completion", body, choices, written), **prompt_ids}

    def write_completion(self, body: CompletionBody, choices: Sequence[Choice]) -> dict[str, Any]:
        written: list[dict[str, Any]] = []
        for choice in choices:
            logprobs = None
            if body.logprobs is not None:
                tokens = self._tokens(choice)
                offsets = accumulate((len(text) for text, _ in tokens), initial=0)
                logprobs = {
                    "tokens": [text for text, _ in tokens],
                    "token_logprobs": [logprob for _, logprob in tokens],
                    "top_logprobs": [{text: logprob} for text, logprob in tokens] if body.logprobs else None,
                    "text_offset": [offset for offset, _ in zip(offsets, tokens, strict=False)],
                }
            prompt_ids = {"prompt_token_ids": list(choice.prompt_ids)} if body.return_token_ids else {}
            written.append({"text": choice.text, "logprobs": logprobs, **prompt_ids})
        return _completion("text_completion", body, choices, written)

    def _tokens(self, choice: Choice) -> list[tuple[str, float]]:
        """Return the text of each token, and its logprob under the distribution that it was sampled from."""
        texts = [str(self._tokenizer.decode([token])) for token in choice.result.token_ids.tolist()]
        logprobs = [max(value, _LOWEST_LOGPROB) for value in choice.result.logprobs.tolist()]
        return list(zip(texts, logprobs, strict=True))


@contextmanager
def _errors_as_api_errors() -> Generator[None, None, None]:
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


def _as_openai(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _completion(kind: str, body: Body, choices: Sequence[Choice], written: Sequence[dict[str, Any]]) -> dict[str, Any]:
    # The tokens of a prompt count once, although each of its choices has them.
    prompt = sum(len(choice.prompt_ids) for choice in choices[:: body.n])
    completion = sum(len(choice.result.token_ids) for choice in choices)
    return {
        "id": f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model or MODEL_NAME,
        "choices": [
            {
                "index": index,
                **own,
                "finish_reason": choice.finish_reason,
                **({"token_ids": choice.result.token_ids.tolist()} if body.return_token_ids else {}),
            }
            for index, (choice, own) in enumerate(zip(choices, written, strict=True))
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }


def chunks(body: Body, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream: the parts of each choice, then the usage if the request asks for it."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage")}
    is_chat = isinstance(body, ChatBody)
    if is_chat:
        head["object"] = "chat.completion.chunk"
    for choice in answer["choices"]:
        for part in _deltas(choice) if is_chat else [choice]:
            yield {**head, "choices": [part]}
            head.pop("prompt_token_ids", None)
    if body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": answer["usage"]}


def _deltas(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield three parts of a choice: the role, the content with its tool calls, and the finish reason."""
    index, message = choice["index"], choice["message"]
    yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    delta: dict[str, Any] = {"content": message["content"] or ""}
    if "tool_calls" in message:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    whole = {name: value for name, value in choice.items() if name != "message"}
    yield {**whole, "delta": delta, "finish_reason": None}
    yield {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}
