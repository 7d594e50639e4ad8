"""Read the bodies of requests: what OpenAI's API allows, minus what could not be kept.

Place on the way: bytes -> JSON -> ChatBody or CompletionBody -> Sampling. A field that nobody knows is ignored, as
vLLM's server does; one that would change what is sampled or shown to the model is refused, never silently left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, TypeVar, cast

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from spurline_rl.protocols.rollout_engine import Sampling

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_RETRY_AFTER_S = 1
_NO_RETRY = {"x-should-retry": "false"}
_LONGEST_MESSAGE = 2000
"""Characters of an error; some quote the request."""


class ApiError(Exception):
    """A request is refused or failed.

    param: the field of the request it is about. code: for programs. retry: whether the same request may be right a
    little later; clients obey.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry = retry

    def response(self) -> web.Response:
        """The answer that is sent."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": str(self)[:_LONGEST_MESSAGE], "type": kind, "param": self.param, "code": self.code}
        # OpenAI's clients repeat requests after 408, 429 and 5xx of their own accord, unless this header forbids it.
        headers = {"x-should-retry": "true", "Retry-After": str(_RETRY_AFTER_S)} if self.retry else _NO_RETRY
        return web.json_response({"error": error}, status=self.status, headers=headers)


_OTHER_DISTRIBUTIONS: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "bad_words": ([],),
}
"""Fields that change what tokens are drawn from, with the values that do not."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "stop_token_ids": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that the endpoint cannot do as they say, with the values that ask for nothing."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_MOST_CHOICES = 128
_MOST_MESSAGES = 16_384
_MOST_TOOLS = 1024
_MOST_STOPS = 64
_LONGEST_NAME = 1024
_BYTES_PER_VALUE, _BYTES_PER_ITEM = 128, 64
"""Bytes of the largest request that there may be one nested value or key, and one item of a list, for. Making 128 Ki
values, or twice as many items, takes Python about 25 ms, in which it does nothing else on any thread."""

_Name = Annotated[str, Field(max_length=_LONGEST_NAME)]
# Every item of a list of a million that is wrong would be an error of its own.
_Objects = list[dict[str, Any]]

BodyT = TypeVar("BodyT", bound="Body")


class StreamOptions(BaseModel):
    """How a stream ends. include_usage: with a chunk that counts tokens."""

    include_usage: bool = False


class Body(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="ignore")

    model: _Name | None = None
    n: int = Field(default=1, ge=1, le=_MOST_CHOICES)
    stop: _Name | Annotated[list[_Name], Field(max_length=_MOST_STOPS, fail_fast=True)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: _Finite | None = Field(default=None, ge=0)
    top_p: _Finite | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    return_token_ids: bool = False

    @property
    def most_tokens(self) -> int | None:
        """Longest response asked for."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a response."""
        return tuple([self.stop] if isinstance(self.stop, str) else self.stop)


class ChatBody(Body):
    """A request to `/v1/chat/completions`."""

    messages: Annotated[_Objects, Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]
    tools: Annotated[_Objects, Field(max_length=_MOST_TOOLS, fail_fast=True)] = []
    tool_choice: Any = "auto"
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=1)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Body):
    """A request to `/v1/completions`. prompt: one or several, as texts or as token ids."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt. Raises ApiError when there is none, or something else."""
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


def read_body(raw: bytes | bytearray, kind: type[BodyT], *, max_bytes: int, ignore_sampling: bool) -> BodyT:
    """The request. Raises ApiError naming the field that is wrong or cannot be kept.

    max_bytes: of the largest request, which says how many values one may have.
    """
    _require_few_values(raw, max_bytes)
    fields = {name: value for name, value in _read_object(raw).items() if value is not None}
    for name, neutral in _UNSUPPORTED.items():
        if name in fields and fields[name] not in neutral:
            raise ApiError(
                400,
                f"{name}: {_shown(fields[name])} is not supported by this endpoint. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    for name, neutral in _OTHER_DISTRIBUTIONS.items():
        if not ignore_sampling and name in fields and fields[name] not in neutral:
            raise sampling_error(name, _shown(fields[name]), "samples without it")
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{place}: {first['msg']}.", param=str(first["loc"][0]) if place else None) from error
    if body.seed is not None and not ignore_sampling:
        raise sampling_error("seed", _shown(fields["seed"]), "derives the seed of each turn, so that it can be resumed")
    return body


def sampling_of(body: Body, run: Sampling, *, ignore_sampling: bool) -> Sampling:
    """How to sample for this request: as the run does, within its limits, and with the request's own."""
    most = run.max_new_tokens if body.most_tokens is None else min(body.most_tokens, run.max_new_tokens)
    sampling = replace(run, max_new_tokens=most, stop=(*run.stop, *(stop for stop in body.stops if stop)))
    if ignore_sampling:
        return sampling
    return replace(
        sampling,
        temperature=run.temperature if body.temperature is None else body.temperature,
        top_p=run.top_p if body.top_p is None else body.top_p,
        top_k=run.top_k if body.top_k is None else max(0, body.top_k),
    )


def sampling_error(name: str, value: str, instead: str) -> ApiError:
    """The run samples in another way than a request asks for."""
    return ApiError(
        400,
        f"{name} is {value}, but this run {instead}, and what is sampled in another way cannot be trained on. Leave "
        f"{name} out of the request, or set the environment's ignore_sampling: true.",
        param=name,
        code="sampling_differs",
    )


def _require_few_values(raw: bytes | bytearray, max_bytes: int) -> None:
    """Raise ApiError for what would take long to make, whether it is in the JSON or in texts that hold JSON."""
    most_values, most_items = max(1024, max_bytes // _BYTES_PER_VALUE), max(1024, max_bytes // _BYTES_PER_ITEM)
    if len(raw) <= most_values:
        return
    values, items = sum(map(raw.count, (b"[", b"{", b":"))), raw.count(b",")
    if values > most_values or items > most_items:
        raise ApiError(
            413,
            f"The request has {values} brackets, braces and colons and {items} commas, of which there may be "
            f"{most_values} and {most_items} (environment.max_body_bytes / {_BYTES_PER_VALUE} and "
            f"{_BYTES_PER_ITEM}).",
            code="body_too_large",
        )


def _read_object(raw: bytes | bytearray) -> Mapping[str, Any]:
    try:
        # Strict: UTF-8 alone, no half of a surrogate pair, no NaN, 200 levels at most.
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The request is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "The request is not a JSON object.", code="invalid_json")
    return fields


def _shown(value: Any) -> str:
    text = json.dumps(_shortened(value))
    return text if len(text) <= 80 else f"{text[:80]}..."


def _shortened(value: Any) -> Any:
    """As much of the value as can be shown; the whole may be as long as the request."""
    if isinstance(value, str):
        return value[:81]
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name[:81]: _shortened(item) for name, item in islice(items, 8)}
    if isinstance(value, list):
        return [_shortened(item) for item in islice(cast("list[Any]", value), 8)]
    return value
