"""Read the bodies of requests: what the APIs of OpenAI and Anthropic have in common.

Unknown fields are ignored, as in vLLM's server. A known field with an unsupported value is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeVar, cast

from aiohttp import web
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from spurline_agents.configs import EndpointConfig
from spurline_rl.protocols.rollout_engine import Sampling
from spurline_text.rows.rows import BadRowError, describe

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 408: "invalid_request_error", 413: "request_too_large"}


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

    def response(self, *, is_anthropic: bool = False) -> web.Response:
        """Return the error as the vendor's API sends it. For Anthropic's, `param` and `code` are additional."""
        types, of_server = (_ANTHROPIC_TYPES, "api_error") if is_anthropic else (_TYPES, "server_error")
        kind = types.get(self.status, of_server if self.status >= 500 else "invalid_request_error")
        # A message may quote the request, which may be long.
        error = {"message": str(self)[:2000], "type": kind, "param": self.param, "code": self.code}
        # Without this header, the vendors' clients repeat requests after 408, 429 and 5xx.
        headers = {"x-should-retry": "false"}
        body = {"type": "error", "error": error} if is_anthropic else {"error": error}
        return web.json_response(body, status=self.status, headers=headers)


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
"""Fields that no API of the endpoint supports. Only the listed values are accepted."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_BYTES_PER_VALUE = 16
"""A request may have at most `max_body_bytes / _BYTES_PER_VALUE` JSON values: 256 Ki by default. Python takes up
to 50 ms to make 256 Ki values, and stops all other threads for this time."""

Name = Annotated[str, Field(max_length=1024)]
# Without fail_fast, pydantic would make an error for each wrong item of a long list.
_Objects = list[dict[str, Any]]
Messages = Annotated[_Objects, Field(min_length=1, max_length=16_384, fail_fast=True)]
Tools = Annotated[_Objects, Field(max_length=1024, fail_fast=True)]
_Stops = Annotated[
    list[Name],
    Field(max_length=64, fail_fast=True),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]

BodyT = TypeVar("BodyT", bound="Body")


class Body(BaseModel):
    """The fields that all requests for turns of the model share.

    `unsupported` names fields that this API does not support here, with the values that are accepted.
    """

    model_config = ConfigDict(extra="ignore")

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: Name | None = None
    n: int = Field(default=1, ge=1, le=1)
    stop: _Stops = Field(default=[], validation_alias=AliasChoices("stop", "stop_sequences"))
    stream: bool = False
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: _Finite | None = Field(default=None, ge=0)
    top_p: _Finite | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None


def read_body(raw: bytes, kind: type[BodyT], config: EndpointConfig) -> BodyT:
    """Read a request.

    Args:
        raw: The bytes of the body.
        kind: The body of one API.
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
    for name, neutral in {**_UNSUPPORTED, **kind.unsupported}.items():
        if name in fields and fields[name] not in neutral:
            raise unsupported(name, fields[name])
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


def unsupported(name: str, value: Any) -> ApiError:
    """Return the error for a field whose value the endpoint cannot honor."""
    text = f"{name}: {_shown(value)} is not supported by this endpoint. Leave it out."
    return ApiError(400, text, param=name, code="unsupported_parameter")


def read_text(content: Any, field: str, types: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content, which is a string or a list of parts of these types.

    Raises:
        BadRowError: If a part is an image or anything else that is no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRowError(field, f"is {describe(content)}, expected text or a list of text parts.")
    parts = enumerate(cast("list[Any]", content))
    return "".join(read_part(part, f"{field}[{place}]", types) for place, part in parts)


def read_part(part: Any, field: str, types: Sequence[str] = ("text",)) -> str:
    """Return the text of a part of these types. Raises BadRowError if it is an image or anything else."""
    kind = kind_of(part, field)
    if kind not in types or not isinstance(part.get("text"), str):
        form = f'{{"type": "{types[0]}", "text": "..."}}'
        raise BadRowError(field, f"is a part of type {kind[:80]!r}; only text parts {form} can be trained on.")
    return part["text"]


def kind_of(item: Any, field: str, default: str = "") -> str:
    """Return the `type` of an item or a part of a request. Raises BadRowError if it has none."""
    kind = item.get("type", default) if isinstance(item, dict) else ""
    if not isinstance(kind, str) or not kind:
        raise BadRowError(field, f"is {describe(item)}, expected an object with a type.")
    return kind


def as_functions(tools: Sequence[Mapping[str, Any]], kind: str, schema: str) -> list[dict[str, Any]] | None:
    """Return tools that have name, description and schema as fields of their own as chat completions write them."""
    found: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        if tool.get("type", kind) != kind or not isinstance(tool.get("name"), str):
            problem = f"has type {_shown(tool.get('type'))}. Only functions that have a name are supported."
            raise BadRowError(f"tools[{number}]", problem)
        function = {name: tool[name] for name in ("name", "description") if tool.get(name)}
        found.append({"type": "function", "function": {**function, "parameters": tool.get(schema) or {}}})
    return found or None


def sampling_of(body: Body, run: Sampling, *, ignore_sampling: bool) -> Sampling:
    """Return the run's sampling with the changes that this request asks for, within the run's limits."""
    most = run.max_new_tokens if body.max_tokens is None else min(body.max_tokens, run.max_new_tokens)
    sampling = replace(run, max_new_tokens=most, stop=(*run.stop, *filter(None, body.stop)))
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
