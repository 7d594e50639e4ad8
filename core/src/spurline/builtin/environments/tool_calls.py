"""Tools of a conversation: the calls a model writes, the functions they name, and what comes back.

A call is written as `<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>`; a turn may
have several. Everything that goes wrong with a call is answered with a text that begins with `error:`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spurline.builtin.environment_configs import BUILT_IN_TOOLS
from spurline.builtin.user_functions import load_function
from spurline.errors import PluginError, SpurlineError, listing
from spurline.protocols.environment import AttemptFailedError
from spurline.rl.thread_calls import within

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}


@dataclass(frozen=True)
class ToolCall:
    """A call as it was written. problem: what is wrong with it, or empty."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class ToolResult:
    """What the model is told."""

    name: str
    text: str
    failed: bool

    def message(self) -> dict[str, str]:
        """For the conversation."""
        return {"role": "tool", **({"name": self.name} if self.name else {}), "content": self.text}


def parse_calls(text: str) -> list[ToolCall]:
    """The calls in a turn's text, in order."""
    return [_parse(body, is_closed=bool(end)) for body, end in _CALL.findall(text)]


class Toolbox:
    """Functions by the names that the model calls them with.

    paths: name -> `module:function` or the name of a built-in tool. A function gets the call's arguments by name; what
    it returns is told as text. It may be async; it may run several times at once.
    """

    def __init__(self, paths: Mapping[str, str], timeout_s: float) -> None:
        self._functions = {
            name: load_function(BUILT_IN_TOOLS.get(path, path), f"tool '{name}'") for name, path in paths.items()
        }
        self._signatures = {name: _signature(name, function) for name, function in self._functions.items()}
        self._timeout_s = timeout_s

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as JSON schemas, as chat templates take them: from signature and docstring."""
        return [_schema(name, function, self._signatures[name]) for name, function in self._functions.items()]

    async def answer(self, call: ToolCall) -> ToolResult:
        """Make the call. Raises only SpurlineErrors of the tool itself, which are not the model's doing."""
        problem = call.problem or self._problem(call)
        if problem:
            return ToolResult(call.name, f"error: {problem}", failed=True)
        try:
            value = await within(self._timeout_s, f"the tool {call.name}", self._functions[call.name], **call.arguments)
        except AttemptFailedError as error:
            return ToolResult(call.name, f"error: {error}", failed=True)
        except SpurlineError:
            raise
        except Exception as error:  # noqa: BLE001 - told to the model
            return ToolResult(call.name, f"error: {type(error).__name__}: {error}", failed=True)
        return ToolResult(call.name, value if isinstance(value, str) else _as_text(value), failed=False)

    def _problem(self, call: ToolCall) -> str:
        if call.name not in self._functions:
            return f"there is no tool '{call.name}'. Tools: {listing(self._functions)}."
        try:
            self._signatures[call.name].bind(**call.arguments)
        except TypeError as error:
            return f"{call.name}: {error}."
        return ""


def _parse(body: str, *, is_closed: bool) -> ToolCall:
    example = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    if not is_closed:
        return ToolCall("", {}, f"a tool call was not closed; write {example}.")
    try:
        call = json.loads(body)
    except ValueError as error:
        return ToolCall("", {}, f"the tool call is not valid JSON ({error}); write {example}.")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, f"the tool call has no name; write {example}.")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, f"the arguments of {call['name']} are not an object; write {example}.")
    return ToolCall(call["name"], arguments)


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(f"The tool '{name}' does not tell its arguments: {error}. Wrap it in a function.") from error


def _schema(name: str, function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    parameters = signature.parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    properties = {parameter.name: _schema_of(parameter) for parameter in parameters}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": inspect.getdoc(function) or "",
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _schema_of(parameter: inspect.Parameter) -> dict[str, str]:
    annotation = parameter.annotation
    type_name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return {"type": _JSON_TYPES[type_name]} if type_name in _JSON_TYPES else {}
