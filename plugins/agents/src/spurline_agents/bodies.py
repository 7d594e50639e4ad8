"""Read the bodies of requests as OpenAI's API defines them.

Unknown fields are ignored, as in vLLM's server. A known field with an unsupported value is an error.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, TypeVar, cast

from aiohttp import web
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from spurline_agents.configs import HarnessConfig
from spurline_rl.protocols.rollout_engine import Sampling

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error that is sent to the client of a request.

    Args:
        status: HTTP status.
        message: The error text for people.
        param: The field of the request that is wrong.
        code: A fixed name of the error, for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def response(self) -> web.Response:
        """Return the error as OpenAI's API sends it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # A message may quote the request, which may be long.
        error = {"message": str(self)[:2000], "type": kind, "param": self.param, "code": self.code}
        # Without this header, OpenAI's clients repeat requests after 408, 429 and 5xx.
        return web.json_response({"error": error}, status=self.status, headers={"x-should-retry": "false"})


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
"""Fields that change the distribution of tokens. The listed values do not change it, so they are accepted."""

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
"""Fields that the endpoint does not support. Only the listed values are accepted."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_BYTES_PER_VALUE = 16
"""A request may have at most `max_body_bytes / _BYTES_PER_VALUE` JSON values: 256 Ki by default. Python takes up
to 50 ms to make 256 Ki values, and stops all other threads for this time."""

_Name = Annotated[str, Field(max_length=1024)]
# Without fail_fast, pydantic would make an error for each wrong item of a long list.
_Objects = list[dict[str, Any]]

BodyT = TypeVar("BodyT", bound="Body")


class StreamOptions(BaseModel):
    """Options of a stream. If `include_usage` is true, the last chunk has the token counts."""

    include_usage: bool = False


class Body(BaseModel):
    """The fields that requests for chat and for text completions share."""

    model_config = ConfigDict(extra="ignore")

    model: _Name | None = None
    n: int = Field(default=1, ge=1, le=128)
    stop: _Name | Annotated[list[_Name], Field(max_length=64, fail_fast=True)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: _Finite | None = Field(default=None, ge=0)
    top_p: _Finite | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts that end a response."""
        return tuple([self.stop] if isinstance(self.stop, str) else self.stop)


class ChatBody(Body):
    """A request to `/v1/chat/completions`."""

    messages: Annotated[_Objects, Field(min_length=1, max_length=16_384, fail_fast=True)]
    tools: Annotated[_Objects, Field(max_length=1024, fail_fast=True)] = []
    tool_choice: Any = "auto"
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=1)


class CompletionBody(Body):
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


def read_body(raw: bytes, kind: type[BodyT], config: HarnessConfig) -> BodyT:
    """Read a request.

    Args:
        raw: The bytes of the body.
        kind: ChatBody or CompletionBody.
        config: The settings that limit requests.

    Raises:
        ApiError: If the request is malformed, or a field is wrong or not supported. The error names the field.
    """
    _require_few_values(raw, config.max_body_bytes)
    try:
        # This parser takes only UTF-8, no lone surrogates, no NaN, and at most 200 levels of nesting.
        given = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The request is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(given, dict):
        raise ApiError(400, "The request is not a JSON object.", code="invalid_json")
    fields = {name: value for name, value in cast("dict[str, Any]", given).items() if value is not None}
    for name, neutral in _UNSUPPORTED.items():
        if name in fields and fields[name] not in neutral:
            raise ApiError(
                400,
                f"{name}: {_shown(fields[name])} is not supported by this endpoint. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    for name, neutral in _OTHER_DISTRIBUTIONS.items():
        if not config.ignore_sampling and name in fields and fields[name] not in neutral:
            raise sampling_error(name, _shown(fields[name]), "samples without it")
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{place}: {first['msg']}.", param=str(first["loc"][0]) if place else None) from error
    if body.seed is not None and not config.ignore_sampling:
        raise sampling_error("seed", _shown(fields["seed"]), "derives the seed of each turn, so that it can be resumed")
    return body


def sampling_of(body: Body, run: Sampling, *, ignore_sampling: bool) -> Sampling:
    """Return the run's sampling with the changes that this request asks for, within the run's limits."""
    most = run.max_new_tokens if body.max_tokens is None else min(body.max_tokens, run.max_new_tokens)
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
    """Return the error for a request that would change the run's sampling distribution."""
    return ApiError(
        400,
        f"{name} is {value}, but this run {instead}, and cannot train on tokens that are sampled differently. "
        f"Leave {name} out of the request, or set the environment's ignore_sampling: true.",
        param=name,
        code="sampling_differs",
    )


def _require_few_values(raw: bytes, max_bytes: int) -> None:
    """Raise ApiError if the body may have so many JSON values that parsing would block other threads for too long."""
    most = max(1024, max_bytes // _BYTES_PER_VALUE)
    count = sum(map(raw.count, (b"[", b"{", b":", b",")))
    if count > most:
        raise ApiError(
            413,
            f"The request has {count} brackets, braces, colons and commas; at most {most} are allowed "
            f"(environment.max_body_bytes / {_BYTES_PER_VALUE}).",
            code="body_too_large",
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
