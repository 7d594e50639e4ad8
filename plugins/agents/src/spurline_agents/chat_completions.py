"""OpenAI's chat completions and text completions.

`token_ids` and `prompt_token_ids` are in the same JSON objects as in answers of vLLM's server.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

from pydantic import AliasChoices, BaseModel, Field

from spurline_agents.bodies import ApiError, Body, BodyT, Messages, read_body
from spurline_agents.responses import MODEL_NAME, Choice, Conversation, ConversationBody, Dialect, Generate
from spurline_agents.sessions import LiveSession
from spurline_text.prompts import encode_prompt
from spurline_text.rows.messages import read_messages, read_tools


class StreamOptions(BaseModel):
    """Options of a stream. If `include_usage` is true, the last chunk has the token counts."""

    include_usage: bool = False


class OpenAIBody(Body):
    """The fields that requests for chat and for text completions share."""

    n: int = Field(default=1, ge=1, le=128)
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


class ChatBody(OpenAIBody, ConversationBody):
    """A request to `/v1/chat/completions`."""

    unsupported = {"tool_choice": ("none", "auto")}

    messages: Messages
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=1)

    def conversation(self, session: LiveSession) -> Conversation:
        return read_messages(self.messages, "messages"), read_tools(self.tools, "tools")


class CompletionBody(OpenAIBody):
    """A request to `/v1/completions`, with one or several prompts as texts or as token ids."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return all prompts. Raises ApiError if there is no prompt, or if one is neither text nor token ids."""
        prompts: list[Any] = (
            self.prompt if isinstance(self.prompt, list) and not _is_prompt(self.prompt) else [self.prompt]
        )
        if not prompts or any(item in ("", []) for item in prompts):
            raise ApiError(400, "prompt is empty: give a text or token ids.", param="prompt")
        if not all(map(_is_prompt, prompts)):
            raise ApiError(
                400, "prompt: expected a text, token ids, or a list of texts or of token ids.", param="prompt"
            )
        return prompts


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(type(token) is int for token in cast("list[Any]", value))
    )


class _Untyped(Dialect[BodyT]):
    """An API whose streams have chunks of one form."""

    def events(self, body: Any, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
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

    def stream(self, body: Any, answer: dict[str, Any]) -> list[bytes]:
        chunks = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in self.events(body, answer)]
        return [*chunks, b"data: [DONE]\n\n"]


class ChatCompletions(_Untyped[ChatBody]):
    """The API that most agents use."""

    kind = ChatBody

    def write(self, session: LiveSession, body: ChatBody, choices: Sequence[Choice]) -> dict[str, Any]:
        written: list[dict[str, Any]] = []
        for choice in choices:
            logprobs = None
            if body.logprobs:
                entries = [
                    {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
                    for text, logprob in self.tokens(choice)
                ]
                # The engine reports only the logprob of the sampled token.
                logprobs = {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}
            written.append({"message": {"refusal": None, **choice.message()}, "logprobs": logprobs})
        prompt_ids = {"prompt_token_ids": list(choices[0].prompt_ids)} if body.return_token_ids else {}
        return {**_completion("chat.completion", body, choices, written), **prompt_ids}


class Completions(_Untyped[CompletionBody]):
    """The API for prompts without messages, as texts or as token ids."""

    kind = CompletionBody

    def read(self, session: LiveSession, raw: bytes) -> tuple[CompletionBody, Generate]:
        body = read_body(raw, CompletionBody, self.config)
        prompts = body.prompts
        session.take_turns(body.n * len(prompts))
        asked = [encoded for prompt in prompts for encoded in [self._encode(prompt)] * body.n]

        async def generate() -> list[Choice]:
            results = await self.ask(
                session, body, lambda sampling: [session.policy.generate(prompt, sampling) for prompt in asked]
            )
            return [
                Choice(self.text(result, body)[0], result.finish_reason, result, prompt)
                for prompt, result in zip(asked, results, strict=True)
            ]

        return body, generate

    def write(self, session: LiveSession, body: CompletionBody, choices: Sequence[Choice]) -> dict[str, Any]:
        written: list[dict[str, Any]] = []
        for choice in choices:
            logprobs = None
            if body.logprobs is not None:
                tokens = self.tokens(choice)
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

    def _encode(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of the prompt of a text completion. Raises ApiError for ids that are no tokens."""
        if isinstance(prompt, str):
            return encode_prompt(self.tokenizer, prompt, is_chat=False)
        vocabulary = len(self.tokenizer)
        bad = next((token for token in (min(prompt), max(prompt)) if not 0 <= token < vocabulary), None)
        if bad is not None:
            text = f"prompt: {bad} is not the id of a token. The tokenizer has {vocabulary} tokens."
            raise ApiError(400, text, param="prompt")
        return prompt


def _completion(
    kind: str, body: OpenAIBody, choices: Sequence[Choice], written: Sequence[dict[str, Any]]
) -> dict[str, Any]:
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


def _deltas(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield three parts of a choice: the role, the content with its tool calls, and the finish reason."""
    index, message = choice["index"], choice["message"]
    yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    delta: dict[str, Any] = {"content": message["content"] or ""}
    delta |= {key: message[key] for key in ("reasoning_content",) if key in message}
    if "tool_calls" in message:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    whole = {name: value for name, value in choice.items() if name != "message"}
    yield {**whole, "delta": delta, "finish_reason": None}
    yield {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}
