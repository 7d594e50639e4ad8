"""Grammars of tool calls: how model families write reasoning, content and calls in the text of a turn.

Reasoning comes first, between `<think>` and `</think>` or `[THINK]` and `[/THINK]`. Then comes the content, and then
the calls. gpt-oss writes each part as a message of a channel. vLLM's parsers read well-formed turns in the same way.
Here, a malformed call is a ToolCall with a `problem`; vLLM's parsers return such a turn as content.
"""

# ruff: noqa: RUF001, RUF002 - DeepSeek's special tokens have these letters

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

MAX_CALLS = 128
"""Largest number of calls in one turn."""

Schemas = Sequence[Mapping[str, Any]]
"""JSON schemas of tools, as in OpenAI's API."""
_Types = Mapping[str, Mapping[str, Set[str]]]
"""The JSON types that each parameter of each tool may have."""


@dataclass(frozen=True)
class ToolCall:
    """A call by the model. If it cannot be made, `problem` says why, else `problem` is empty.

    Some models write an `id`. Otherwise, it is empty until the turn becomes a message.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    id: str = ""


@dataclass(frozen=True)
class ParsedTurn:
    """The parts of a turn. `content` has neither reasoning nor calls; clients and rewards read it."""

    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]


class _MalformedError(Exception):
    """A call that cannot be read. `name` is its tool, if that is known."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Grammar:
    """How a family writes calls.

    Attributes:
        marks: Texts that only the chat templates of this family have.
        begins: Regular expression that finds the first call. The text before it is content.
        call: Regular expression of one call, with its `body`. If there is a group `end` and it is None, the call was
            not closed.
        read: Returns the calls of a body, given the types of parameters. It may raise _MalformedError.
        example: A call, to be shown to a model that wrote a malformed one.
        ends: Tokens that end a turn, besides the tokenizer's end token.
    """

    marks: Sequence[str]
    begins: str
    call: str
    read: Callable[[str, _Types], Sequence[ToolCall]]
    example: str
    ends: Sequence[str] = ()

    def parse(self, text: str, tools: Schemas, *, is_thinking: bool) -> ParsedTurn:
        """Return the parts of a turn. `is_thinking` is true if the prompt ends inside of the reasoning."""
        reasoning, rest = self._split(text, is_thinking=is_thinking)
        begin = re.search(self.begins, rest)
        if begin is None:
            return ParsedTurn(rest if reasoning is None else rest.strip(), reasoning, ())
        return ParsedTurn(rest[: begin.start()].strip(), reasoning, self.calls(rest[begin.start() :], tools))

    def _split(self, text: str, *, is_thinking: bool) -> tuple[str | None, str]:
        """Return the reasoning and the text after it. A call ends reasoning that has no end, or no beginning."""
        begin = re.match(r"\s*(?:<think>|\[THINK\])", text)
        start, is_open = begin.end() if begin else 0, is_thinking or begin is not None
        call = None if is_open else re.search(self.begins, text)
        end = re.compile(r"</think>|\[/THINK\]").search(text, start, call.start() if call else len(text))
        if end is None and not is_open:
            return None, text
        end = end or re.compile(rf"(?={self.begins})|\Z").search(text, start)
        assert end is not None, "every text has an end"
        return text[start : end.start()].strip(), text[end.end() :]

    def calls(self, text: str, tools: Schemas) -> tuple[ToolCall, ...]:
        """Return the calls of a text, which begins with a call."""
        found: list[ToolCall] = []
        types = _types_of(tools)
        for match in islice(re.finditer(self.call, text, re.DOTALL), MAX_CALLS + 1):
            try:
                if match.groupdict().get("end", "") is None:
                    raise _MalformedError("a tool call was not closed")
                found += self.read(match["body"], types)
            except _MalformedError as error:
                found.append(ToolCall(error.name, {}, f"{error}; write {self.example}."))
        if not found:
            found.append(ToolCall("", {}, f"the tool call has another form; write {self.example}."))
        if len(found) > MAX_CALLS:
            found[MAX_CALLS:] = [ToolCall("", {}, f"a turn may have {MAX_CALLS} tool calls; the others were not made.")]
        return tuple(found)


class Harmony(Grammar):
    """Messages of channels: `<|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|>`, the first without its start."""

    def parse(self, text: str, tools: Schemas, *, is_thinking: bool) -> ParsedTurn:
        if "<|message|>" not in text and "<|channel|>" not in text:
            return ParsedTurn(text, None, ())
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for part in re.split(self.begins, text):
            header, mark, body = part.rpartition("<|message|>")
            # A call without the mark is malformed, since all of it is read as the arguments.
            if recipient := re.search(r"to=([^\s<]+)", header if mark else part):
                if len(calls) <= MAX_CALLS:
                    calls += self.calls(f"{recipient[1].removeprefix('functions.')}\n{body}", tools)
            else:
                (reasoning if "<|channel|>analysis" in header else content).append(body)
        return ParsedTurn("".join(content).strip(), "\n".join(reasoning) if reasoning else None, tuple(calls))


def _between(begin: str, end: str) -> str:
    """Return a regular expression of a call between two marks."""
    return rf"{re.escape(begin)}(?P<body>.*?)(?:(?P<end>{re.escape(end)})|\Z)"


def _types_of(tools: Schemas) -> dict[str, dict[str, set[str]]]:
    found: dict[str, dict[str, set[str]]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        with suppress(AttributeError, KeyError, TypeError):
            # The schemas of a client may be anything. Parameters without a type are texts.
            properties = function["parameters"]["properties"]
            found[function["name"]] = {name: _types_in(schema) for name, schema in properties.items()}
    return found


def _types_in(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows, also in a union; `string` if it has none."""
    named = schema.get("type", ())
    parts = [part for union in ("anyOf", "oneOf", "allOf") for part in schema.get(union, ())]
    return ({named} if isinstance(named, str) else {*named}).union(*map(_types_in, parts)) or {"string"}


def _typed(text: str, types: Set[str]) -> Any:
    """Return the value of an argument that is written without quotes. It is text if it may be, and is no other type."""
    for read in (json.loads,) if "string" in types else (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = read(text)
            if "string" not in types or types & _TYPES_OF_VALUES.get(type(value), set()):
                return value
    return text


def _json(text: str, read: Callable[[str], Any] = json.loads) -> Any:
    try:
        return read(text)
    except (ValueError, RecursionError) as error:
        raise _MalformedError(f"the tool call is not valid JSON ({error})") from error


def _first_json(text: str, place: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins at `place`, and where it ends."""
    return _json(text, lambda text: json.JSONDecoder().raw_decode(text, place))


def read_call(name: str, arguments: str, id: str) -> ToolCall:
    """Return a call whose arguments are written as JSON. If it is malformed, it has a `problem`."""
    try:
        return _made(name, _json(arguments or "{}"), id)
    except _MalformedError as error:
        return ToolCall(name, {}, f"{error}.", id)


def _made(name: Any, arguments: Any, id: str = "") -> ToolCall:
    """Return a call. Raises _MalformedError if it has no name, or its arguments are not an object."""
    if not isinstance(name, str) or not name.strip():
        raise _MalformedError("the tool call has no name")
    if not isinstance(arguments, dict):
        raise _MalformedError(f"the arguments of {name} are not an object", name.strip())
    try:
        # Python's lists may have values that messages cannot.
        plain = json.loads(json.dumps(arguments))
    except (TypeError, ValueError, RecursionError) as error:
        raise _MalformedError(f"the arguments of {name} are not JSON ({error})", name.strip()) from error
    return ToolCall(name.strip(), plain, id=id)


def _of_object(value: Any) -> ToolCall:
    call = value if isinstance(value, dict) else {}
    return _made(call.get("name"), call.get("arguments", call.get("parameters", {})), str(call.get("id", "")))


def _read_object(body: str, types: _Types) -> list[ToolCall]:
    return [_of_object(_json(body))]


def _read_objects(body: str, types: _Types) -> list[ToolCall]:
    """Read objects one after the other, between which may be other text, such as `;`."""
    calls: list[ToolCall] = []
    place = body.find("{")
    while place >= 0:
        value, place = _first_json(body, place)
        calls.append(_of_object(value))
        place = body.find("{", place)
    return calls


def _read_functions(body: str, types: _Types) -> list[ToolCall]:
    """Read `NAME><parameter=KEY>VALUE</parameter>...`."""
    name, closing, rest = body.partition(">")
    if not closing:
        raise _MalformedError("the tool call has no name")
    return [_of_pairs(name, r"<parameter=([^<>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=))", rest, types)]


def _read_pairs(body: str, types: _Types) -> list[ToolCall]:
    """Read `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`."""
    name, rest = re.findall(r"\A\s*([^\n<{]*)(.*)", body, re.DOTALL)[0]
    pair = r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|(?=<arg_key>))"
    return [_of_pairs(name, pair, rest, types)]


def _of_pairs(name: str, pair: str, text: str, types: _Types) -> ToolCall:
    """Return a call whose arguments are all that the text has. `pair` finds the name and the value of each."""
    known = types.get(name.strip(), {})
    if left := re.sub(pair, "", text, flags=re.DOTALL).strip():
        raise _MalformedError(f"the tool call has text outside of its arguments ({left:.80})", name.strip())
    pairs = [(key.strip(), value) for key, value in re.findall(pair, text, re.DOTALL)]
    return _made(name, {key: _typed(value, known.get(key, {"string"})) for key, value in pairs})


def _read_python(body: str, types: _Types) -> list[ToolCall]:
    """Read a list of Python calls with literal arguments. JSON's `true`, `false` and `null` are accepted too."""
    try:
        calls = ast.parse(body.strip(), mode="eval").body
        return [_of_python(call) for call in calls.elts] if isinstance(calls, ast.List) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _MalformedError(f"the tool calls are not a valid Python list ({error})") from error


def _of_python(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("it has more than calls with named arguments")
    values = {str(given.arg): ast.literal_eval(_JsonNames().visit(given.value)) for given in call.keywords}
    return _made(ast.unparse(call.func), values)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def _read_mistral(body: str, types: _Types) -> list[ToolCall]:
    """Read `NAME[ARGS]{...}`, with `[CALL_ID]` before the arguments in some versions, or a list of objects."""
    named = re.match(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)", body)
    body = body[named.end() :] if named else body.lstrip()
    found, end = _first_json(body)
    if "{" in body[end:]:
        raise _MalformedError("more JSON follows the tool calls")
    if named:
        return [_made(named[1], found, named[2] or "")]
    return [*map(_of_object, found if isinstance(found, list) else [found])]


def _read_deepseek(body: str, types: _Types) -> list[ToolCall]:
    """Read `function<｜tool▁sep｜>NAME` with JSON in a fence (V3), or `NAME<｜tool▁sep｜>{...}` (V3.1)."""
    head, _, rest = body.partition("<｜tool▁sep｜>")
    if rest.lstrip().startswith("{"):
        return [_made(head, _json(rest))]
    name, _, fenced = rest.partition("\n")
    return [_made(name, _json(fenced.strip().removeprefix("```json").removesuffix("```")))]


def _read_kimi(body: str, types: _Types) -> list[ToolCall]:
    """Read `functions.NAME:NUMBER<|tool_call_argument_begin|>{...}`."""
    id, _, arguments = (part.strip() for part in body.partition("<|tool_call_argument_begin|>"))
    return [_made(re.sub(r":\d+$", "", id.removeprefix("functions.")), _json(arguments), id)]


def _read_named(body: str, types: _Types) -> list[ToolCall]:
    """Read the name of a tool in the first line, and an object."""
    name, _, arguments = body.partition("\n")
    return [_made(name, _json(arguments))]


_TYPES_OF_VALUES: Mapping[type, Set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}

GRAMMARS: Mapping[str, Grammar] = {
    "harmony": Harmony(
        ("<|channel|>",),
        r"<\|start\|>assistant|<\|end\|>|<\|call\|>|<\|return\|>",
        r"(?P<body>.+)",
        _read_named,
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>",
        ("<|call|>", "<|return|>"),
    ),
    "kimi_k2": Grammar(
        ("<|tool_call_begin|>",),
        r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
        _between("<|tool_call_begin|>", "<|tool_call_end|>"),
        _read_kimi,
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
    ),
    "deepseek_v3": Grammar(
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>",
        _between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        _read_deepseek,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>",
    ),
    "mistral": Grammar(
        ("[TOOL_CALLS]",),
        r"\[TOOL_CALLS\]",
        r"\[TOOL_CALLS\](?P<body>.*?)(?=\[TOOL_CALLS\]|\Z)",
        _read_mistral,
        '[TOOL_CALLS][{"name": "...", "arguments": {...}}]',
    ),
    "glm45": Grammar(
        ("<arg_key>",),
        "<tool_call>",
        _between("<tool_call>", "</tool_call>"),
        _read_pairs,
        "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        ("<|observation|>", "<|user|>"),
    ),
    "qwen3_coder": Grammar(
        ("<function=",),
        "<tool_call>|<function=",
        _between("<function=", "</function>"),
        _read_functions,
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    ),
    "hermes": Grammar(
        ("<tool_call>",),
        "<tool_call>",
        _between("<tool_call>", "</tool_call>"),
        _read_object,
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>',
    ),
    "pythonic": Grammar(
        ("[func_name1(",),
        r"<\|python_start\|>|^\s*\[\s*[A-Za-z_][\w.]*\(",
        r"(?:<\|python_start\|>)?(?P<body>.+?)(?:<\|python_end\|>|\Z)",
        _read_python,
        "[NAME(KEY=VALUE), NAME(KEY=VALUE)]",
        ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"),
    ),
    "llama3_json": Grammar(
        ('{"name": function name, "parameters"', '"parameters": {"ARGUMENT": "VALUE"}'),
        r'<\|python_tag\|>|\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"',
        r"(?P<body>.+)",
        _read_objects,
        '{"name": "...", "parameters": {...}}',
        ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"),
    ),
}
"""The grammar of each format. A chat template may have the marks of several; then the first one is meant."""
