"""Write choices as OpenAI's API does: one JSON object, or the chunks of a stream.

A turn is whole before its first chunk is sent, so that what goes wrong with it has its proper status; a stream is the
same answer in another form. `token_ids` and `prompt_token_ids` stand where vLLM's server puts them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline_async_rl.harness.bodies import Body, ChatBody, CompletionBody
from spurline_async_rl.harness.choices import Choice

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; as vLLM's server does."""


class ResponseWriter:
    """Makes the JSON objects of answers. model: the name told where the request has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def chat(self, body: ChatBody, choices: Sequence[Choice]) -> dict[str, Any]:
        """A chat completion."""
        return {
            **self._head("chat.completion", body),
            "choices": [
                {
                    "index": index,
                    "message": {"refusal": None, **choice.message()},
                    "logprobs": self._chat_logprobs(choice) if body.logprobs else None,
                    "finish_reason": choice.finish_reason,
                    **_token_ids(body, choice),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": _usage(choices, num_prompts=1),
            **({"prompt_token_ids": list(choices[0].prompt_ids)} if body.return_token_ids else {}),
        }

    def chat_chunks(self, body: ChatBody, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """The chunks of a chat completion: role, content, tool calls and end of each choice, then the usage."""
        head = self._head("chat.completion.chunk", body)
        prompt_ids = {"prompt_token_ids": list(choices[0].prompt_ids)} if body.return_token_ids else {}
        for index, choice in enumerate(choices):
            role = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield {**head, "choices": [role], **prompt_ids}
            prompt_ids = {}
            delta: dict[str, Any] = {"content": choice.text}
            if choice.tool_calls:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(choice.tool_calls)]
            logprobs = self._chat_logprobs(choice) if body.logprobs else None
            content = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            yield {**head, "choices": [{**content, **_token_ids(body, choice)}]}
            yield {**head, "choices": [{"index": index, "delta": {}, "finish_reason": choice.finish_reason}]}
        if body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": _usage(choices, num_prompts=1)}

    def completion(self, body: CompletionBody, choices: Sequence[Choice]) -> dict[str, Any]:
        """A text completion."""
        return {
            **self._head("text_completion", body),
            "choices": [self._completion_choice(body, index, choice) for index, choice in enumerate(choices)],
            "usage": _usage(choices, num_prompts=len(choices) // body.n),
        }

    def completion_chunks(self, body: CompletionBody, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """The chunks of a text completion: each choice, then the usage."""
        head = self._head("text_completion", body)
        for index, choice in enumerate(choices):
            yield {**head, "choices": [self._completion_choice(body, index, choice)]}
        if body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": _usage(choices, num_prompts=len(choices) // body.n)}

    def models(self) -> dict[str, Any]:
        """The list of models, which has one."""
        model = {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": "spurline"}
        return {"object": "list", "data": [model]}

    def _head(self, kind: str, body: Body) -> dict[str, Any]:
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model or self._model,
        }

    def _completion_choice(self, body: CompletionBody, index: int, choice: Choice) -> dict[str, Any]:
        prompt_ids = {"prompt_token_ids": list(choice.prompt_ids)} if body.return_token_ids else {}
        return {
            "index": index,
            "text": choice.text,
            "logprobs": None if body.logprobs is None else self._completion_logprobs(body, choice),
            "finish_reason": choice.finish_reason,
            **_token_ids(body, choice),
            **prompt_ids,
        }

    def _tokens(self, choice: Choice) -> list[tuple[str, float]]:
        """Text and logprob of each token; the distribution is the one that was sampled from."""
        texts = [str(self._tokenizer.decode([token])) for token in choice.result.token_ids.tolist()]
        logprobs = [max(value, _LOWEST_LOGPROB) for value in choice.result.logprobs.tolist()]
        return list(zip(texts, logprobs, strict=True))

    def _chat_logprobs(self, choice: Choice) -> dict[str, Any]:
        entries = [{"token": text, "logprob": logprob, "bytes": _bytes(text)} for text, logprob in self._tokens(choice)]
        # The engine tells of no other token than the sampled one.
        return {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}

    def _completion_logprobs(self, body: CompletionBody, choice: Choice) -> dict[str, Any]:
        tokens = self._tokens(choice)
        offsets = accumulate((len(text) for text, _ in tokens), initial=0)
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": [{text: logprob} for text, logprob in tokens] if body.logprobs else None,
            "text_offset": [offset for offset, _ in zip(offsets, tokens, strict=False)],
        }


def _token_ids(body: Body, choice: Choice) -> dict[str, Any]:
    return {"token_ids": choice.result.token_ids.tolist()} if body.return_token_ids else {}


def _usage(choices: Sequence[Choice], *, num_prompts: int) -> dict[str, int]:
    """Tokens of all prompts, each counted once, and of all answers."""
    per_prompt = len(choices) // num_prompts
    prompt = sum(len(choice.prompt_ids) for choice in choices[::per_prompt])
    completion = sum(len(choice.result.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _bytes(text: str) -> list[int] | None:
    """The token's bytes, or None where it is only part of a character."""
    return None if "\ufffd" in text else list(text.encode())
