"""Let the model answer a request, and write what it answers as OpenAI's API does: one JSON object, or a stream of it.

Place on the way: body (`bodies`) -> token ids -> turns of the session's policy -> choices -> JSON; knows nothing of
HTTP. A turn is whole before its first chunk is sent, so that what goes wrong with it has its proper status; a stream is
the same answer in another form. `token_ids` and `prompt_token_ids` stand where vLLM's server puts them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError, PluginError
from spurline_agents.agents import CANCEL_TIMEOUT_S
from spurline_agents.bodies import (
    ApiError,
    Body,
    BodyT,
    ChatBody,
    CompletionBody,
    read_body,
    sampling_error,
    sampling_of,
)
from spurline_agents.configs import HarnessConfig
from spurline_agents.connections import Incoming
from spurline_agents.sessions import LiveSession
from spurline_rl.chat_front import ChatFront, PrefixError, Reply
from spurline_rl.concurrency import all_or_none
from spurline_rl.environments.tools import ToolCall, parse_calls
from spurline_rl.protocols.rollout_engine import GenerationResult, Sampling
from spurline_text.encoding import encode_batch
from spurline_text.rows.messages import Message, read_messages, read_tools
from spurline_text.rows.rows import BadRowError

_CALL_BEGIN = "<tool_call>"
_DISTRIBUTION = ("temperature", "top_p", "top_k")
_PIECE = 2**14
"""Characters that are encoded at a time to count tokens."""
_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; as vLLM's server does."""


@dataclass(frozen=True)
class Choice:
    """One answer of the model.

    text: what the client is told; without end token, special tokens and stop text. tool_calls: as OpenAI writes them.
    """

    text: str
    finish_reason: str
    result: GenerationResult
    prompt_ids: Sequence[int]
    tool_calls: tuple[dict[str, Any], ...] = ()

    def message(self) -> dict[str, Any]:
        """The choice as a message of the conversation."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": self.text or None, "tool_calls": list(self.tool_calls)}


class Answering:
    """Answers requests of any session. config: the environment's.

    A request is read, then its turns are taken, and only then is its prompt laid out: what is refused costs little.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: HarnessConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._vocabulary = len(tokenizer)

    async def chat(self, session: LiveSession, incoming: Incoming) -> tuple[ChatBody, list[Choice]]:
        """`n` turns of the conversation. Raises ApiError, PrefixError and what the policy raises."""
        size = len(incoming.raw)
        body, messages, tools = await session.work.run(size, lambda: self._read_chat(incoming.raw))
        session.take_turns(body.n)
        branches, key = await session.work.run(size, lambda: self._lay_out(session, size, messages, tools, body.n))
        incoming.release()
        sampling = self._sampling(session, body)
        try:
            replies = await all_or_none(
                [branch.reply(sampling) for branch in branches], session.where, CANCEL_TIMEOUT_S
            )
        except PluginError as error:
            raise self._explain(error, session, sampling) from error
        choices = [self._choice(session, body, reply) for reply in replies]
        for branch, choice in zip(branches, choices, strict=True):
            [message] = read_messages([choice.message()], "message")
            session.conversations.remember(key, message, branch)
        session.last_chat = branches[-1]
        return body, choices

    def _read_chat(self, raw: bytearray) -> tuple[ChatBody, list[Message], list[dict[str, Any]] | None]:
        with _requests_fault():
            body = self._read(raw, ChatBody)
            messages, tools = read_messages(body.messages, "messages"), read_tools(body.tools, "tools")
            return body, messages, tools

    def _lay_out(
        self, session: LiveSession, size: int, messages: list[Message], tools: list[dict[str, Any]] | None, count: int
    ) -> tuple[list[ChatFront], bytes]:
        """So many conversations, all the same, in which the model's turn is next. size: of the request."""
        # All of them: which ones the template writes is not known, and the conversation keeps every one.
        self._require_short(_texts_in([messages, tools]), size, "messages")
        with _requests_fault():
            chat, key = session.conversations.find(messages, tools)
            chat.open_turn()
            return [chat.fork() for _ in range(count)], key

    async def complete(self, session: LiveSession, incoming: Incoming) -> tuple[CompletionBody, list[Choice]]:
        """`n` continuations of each prompt, prompt by prompt. Raises ApiError and what the policy raises."""
        size = len(incoming.raw)
        body, prompts = await session.work.run(size, lambda: self._read_completion(incoming.raw))
        session.take_turns(body.n * len(prompts))
        encoded = await session.work.run(size, lambda: [self._encode(prompt, size) for prompt in prompts])
        incoming.release()
        asked = [prompt for prompt in encoded for _ in range(body.n)]
        sampling = self._sampling(session, body)
        try:
            results = await all_or_none(
                [session.policy.generate(prompt, sampling) for prompt in asked], session.where, CANCEL_TIMEOUT_S
            )
        except PluginError as error:
            raise self._explain(error, session, sampling) from error
        choices = [
            Choice(self._text(result, body), result.finish_reason, result, prompt)
            for prompt, result in zip(asked, results, strict=True)
        ]
        return body, choices

    def _read_completion(self, raw: bytearray) -> tuple[CompletionBody, list[str | list[int]]]:
        body = self._read(raw, CompletionBody)
        prompts = body.prompts
        for prompt in prompts:
            if isinstance(prompt, list):
                bad = next((token for token in (min(prompt), max(prompt)) if not 0 <= token < self._vocabulary), None)
                if bad is not None:
                    text = f"prompt: {bad} is no token; the tokenizer has {self._vocabulary} of them."
                    raise ApiError(400, text, param="prompt")
        return body, prompts

    def _read(self, raw: bytearray, kind: type[BodyT]) -> BodyT:
        config = self._config
        return read_body(raw, kind, max_bytes=config.max_body_bytes, ignore_sampling=config.ignore_sampling)

    def _require_short(self, texts: Iterable[str], num_bytes: int, field: str) -> None:
        """Raise ApiError when the texts surely have too many tokens, counted piece by piece: an encoding of a long text
        as a whole takes some hundred times the text's memory."""
        most, count = self._config.max_prompt_tokens, 0
        if num_bytes <= most:
            # No text has more tokens than bytes.
            return
        for piece in _pieces(texts):
            count += len(encode_batch(self._tokenizer, [piece], is_chat=True)[0])
            if count > most:
                raise ApiError(
                    400,
                    f"{field}: the text has more than {most} tokens (environment.max_prompt_tokens).",
                    param=field,
                    code="context_length_exceeded",
                )

    def _sampling(self, session: LiveSession, body: Body) -> Sampling:
        return sampling_of(body, session.policy.sampling, ignore_sampling=self._config.ignore_sampling)

    def _explain(self, error: PluginError, session: LiveSession, sampling: Sampling) -> Exception:
        """The policy refuses what training cannot use: the request's fault where it asked for that."""
        run = session.policy.sampling
        for name in _DISTRIBUTION:
            if getattr(sampling, name) != getattr(run, name):
                return sampling_error(name, f"{getattr(sampling, name):g}", f"samples with {getattr(run, name):g}")
        return error

    def _choice(self, session: LiveSession, body: ChatBody, reply: Reply) -> Choice:
        result = reply.result
        prompt = session.policy.prompt_of(result)
        text = self._text(result, body)
        calls = parse_calls(reply.text) if body.tools and body.tool_choice != "none" else []
        # One malformed call, and all is text: the agent sees what the model wrote. In JSON a name can be half of a
        # surrogate pair, which no client can send back.
        if not calls or any(call.problem or not call.name.isprintable() for call in calls):
            return Choice(text, result.finish_reason, result, prompt)
        finish_reason = "tool_calls" if result.finish_reason == "stop" else result.finish_reason
        before = reply.text.partition(_CALL_BEGIN)[0].strip()
        return Choice(before, finish_reason, result, prompt, tuple(map(_as_openai, calls)))

    def _text(self, result: GenerationResult, body: Body) -> str:
        text = str(self._tokenizer.decode(result.token_ids.tolist(), skip_special_tokens=True))
        if result.finish_reason != "stop":
            return text
        ends = [text.find(stop) for stop in body.stops if stop and stop in text]
        return text[: min(ends)] if ends else text

    def _encode(self, prompt: str | list[int], size: int) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        self._require_short([prompt], size, "prompt")
        [encoding] = encode_batch(self._tokenizer, [prompt], is_chat=False)
        ids = list(encoding.ids)
        # A tokenizer that ends every text would ask the model to go on after the end.
        if ids and ids[-1] == self._tokenizer.eos_token_id and encoding.special_tokens_mask[-1]:
            ids.pop()
        return ids


def _texts_in(value: Any) -> Iterator[str]:
    """Every text of a JSON value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting += chain.from_iterable(cast("dict[str, Any]", item).items())
        elif isinstance(item, list):
            waiting += cast("list[Any]", item)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts one after the other, divided and joined to pieces of some length."""
    gathered: list[str] = []
    room = _PIECE
    for text in texts:
        for start in range(0, len(text), _PIECE):
            gathered.append(text[start : start + _PIECE])
            room -= len(gathered[-1])
            if room <= 0:
                yield "".join(gathered)
                gathered.clear()
                room = _PIECE
    if gathered:
        yield "".join(gathered)


@contextmanager
def _requests_fault() -> Generator[None, None, None]:
    """Messages that cannot be read, or that the template refuses, are the request's mistake."""
    try:
        yield
    except PrefixError:
        raise
    except BadRowError as error:
        raise ApiError(400, str(error), param=error.field) from error
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from error
    except RecursionError as error:
        raise ApiError(400, "messages: they are nested too deeply.", param="messages") from error


def _as_openai(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class ResponseWriter:
    """Makes the JSON objects of answers. model: the name told where the request has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def chat(self, body: ChatBody, choices: Sequence[Choice]) -> dict[str, Any]:
        """A chat completion."""
        answer = self._answer("chat.completion", body, choices, self._chat_choice)
        return {**answer, **({"prompt_token_ids": list(choices[0].prompt_ids)} if body.return_token_ids else {})}

    def completion(self, body: CompletionBody, choices: Sequence[Choice]) -> dict[str, Any]:
        """A text completion."""
        return self._answer("text_completion", body, choices, self._completion_choice)

    def models(self) -> dict[str, Any]:
        """The list of models, which has one."""
        model = {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": "spurline"}
        return {"object": "list", "data": [model]}

    def _answer(
        self, kind: str, body: BodyT, choices: Sequence[Choice], write: Callable[[BodyT, Choice], dict[str, Any]]
    ) -> dict[str, Any]:
        # Each prompt counts once, whatever the number of its answers.
        prompt = sum(len(choice.prompt_ids) for choice in choices[:: body.n])
        completion = sum(len(choice.result.token_ids) for choice in choices)
        return {
            "id": f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model or self._model,
            "choices": [
                {
                    "index": index,
                    **write(body, choice),
                    "finish_reason": choice.finish_reason,
                    **({"token_ids": choice.result.token_ids.tolist()} if body.return_token_ids else {}),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        }

    def _chat_choice(self, body: ChatBody, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if body.logprobs:
            entries = [
                {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
                for text, logprob in self._tokens(choice)
            ]
            # The engine tells of no other token than the sampled one.
            logprobs = {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}
        return {"message": {"refusal": None, **choice.message()}, "logprobs": logprobs}

    def _completion_choice(self, body: CompletionBody, choice: Choice) -> dict[str, Any]:
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
        return {"text": choice.text, "logprobs": logprobs, **prompt_ids}

    def _tokens(self, choice: Choice) -> list[tuple[str, float]]:
        """Text and logprob of each token; the distribution is the one that was sampled from."""
        texts = [str(self._tokenizer.decode([token])) for token in choice.result.token_ids.tolist()]
        logprobs = [max(value, _LOWEST_LOGPROB) for value in choice.result.logprobs.tolist()]
        return list(zip(texts, logprobs, strict=True))


def chunks(body: Body, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answer as the chunks of a stream: the parts of each choice, then the usage where it is asked for."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage")}
    is_chat = isinstance(body, ChatBody)
    if is_chat:
        head["object"] = "chat.completion.chunk"
    for choice in answer["choices"]:
        for part in _deltas(choice) if is_chat else [choice]:
            yield {**head, "choices": [part]}
            # It stands in the first chunk only.
            head.pop("prompt_token_ids", None)
    if body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": answer["usage"]}


def _deltas(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The role, the content with its tool calls, and the end."""
    index, message = choice["index"], choice["message"]
    yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    delta: dict[str, Any] = {"content": message["content"] or ""}
    if "tool_calls" in message:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    whole = {name: value for name, value in choice.items() if name != "message"}
    yield {**whole, "delta": delta, "finish_reason": None}
    yield {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}
