"""Read the messages of a chat row into the form that chat templates understand.

In: OpenAI messages (role, content, tool_calls) or ShareGPT messages (from, value). Out: dicts with `role` and text
`content`, and with parsed arguments of tool calls. Other keys are unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spurline.errors import suggestion
from spurline_text.rows.rows import BadRowError, describe

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI messages, which chat templates use."""

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""The OpenAI role for each role name of other formats."""


def read_messages(value: Any, field: str) -> list[Message]:
    """Return the messages of one field. Raises BadRowError naming the malformed message and key."""
    items = _parsed(value, field)
    if type(items) is not list and (not isinstance(items, Sequence) or isinstance(items, str)):
        raise BadRowError(field, f'is {describe(items)}, expected a list like [{{"role": "user", "content": "..."}}].')
    if not items:
        raise BadRowError(field, "is an empty list: a conversation needs at least one message.")
    return [_message(item, f"{field}[{index}]") for index, item in enumerate(items)]


def read_tools(value: Any, field: str) -> list[dict[str, Any]] | None:
    """Return the tool schemas of a row, or None if it has none. `value` is a list or JSON text."""
    tools = _parsed(value, field) if value else None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise BadRowError(field, f"is {describe(tools)}, expected a list of JSON schemas.")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise BadRowError(f"{field}[{index}]", f"is {describe(tool)}, expected a JSON schema object.")
    return [dict(tool) for tool in tools]


def with_system(messages: list[Message], system: Any, field: str) -> list[Message]:
    """Return the messages. If the `system` column has text, put a system message with this text first."""
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise BadRowError(field, f"is {describe(system)}, expected text.")
    if messages[0]["role"] == "system":
        raise BadRowError(field, "is given, but the conversation begins with its own system message. Keep one of them.")
    return [{"role": "system", "content": system}, *messages]


def assistant_turns(messages: Sequence[Message], first: int = 0) -> list[int]:
    """Return the indices of assistant messages from `first` on."""
    return [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]


def _parsed(value: Any, field: str) -> Any:
    """Parse a list that is written as JSON text, as in CSV and some parquet files. Return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRowError(field, f"is text that is not valid JSON: {error}.") from error


def _message(item: Any, field: str) -> Message:
    if type(item) is dict and len(item) == 2:
        # The usual message needs no further checks.
        role, content = item.get("role"), item.get("content")
        if type(role) is str and role in ROLES and type(content) is str:
            return {"role": role, "content": content}
    if not isinstance(item, Mapping):
        raise BadRowError(field, f"is {describe(item)}, expected an object with role and content.")
    message = {key: value for key, value in item.items() if value is not None}
    role_key, content_key = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    if role_key not in message:
        raise BadRowError(field, f"has no 'role' (or 'from'). Its fields: {', '.join(map(str, item)) or '(none)'}.")
    name = message.pop(role_key)
    role = _role(name, f"{field}.{role_key}")
    content = message.pop(content_key, None)
    calls = message.pop("tool_calls", None)
    if name == "function_call":
        calls, content = _function_call(content, f"{field}.{content_key}"), None
    result: Message = {"role": role}
    if content is not None:
        result["content"] = _text(content, f"{field}.{content_key}")
    elif not calls:
        raise BadRowError(field, f"has no '{content_key}'. Give its text, or tool_calls for an assistant turn.")
    else:
        # Some templates concatenate `content`, and would fail without this key.
        result["content"] = ""
    if calls:
        if role != "assistant":
            raise BadRowError(f"{field}.tool_calls", f"belongs to a {role!r} message; only the assistant calls tools.")
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise BadRowError(f"{field}.tool_calls", f"is {describe(calls)}, expected a list.")
        result["tool_calls"] = [_tool_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return result | message


def _role(name: Any, field: str) -> str:
    if name in ROLES:
        return name
    if isinstance(name, str) and name in SHAREGPT_ROLES:
        return SHAREGPT_ROLES[name]
    known = (*ROLES, *SHAREGPT_ROLES)
    hint = suggestion(name, known) if isinstance(name, str) else ""
    raise BadRowError(field, f"is {describe(name)}, not a known role.{hint} Known roles: {', '.join(known)}.")


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRowError(field, f"is {describe(content)}, expected text or a list of text parts.")
    return "".join(_part(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return part["text"]
    kind = f"a part of type {part['type']!r}" if isinstance(part, Mapping) and "type" in part else describe(part)
    raise BadRowError(field, f'is {kind}; only text parts {{"type": "text", "text": "..."}} can be trained on.')


def _function_call(content: Any, field: str) -> list[Any]:
    try:
        parsed = json.loads(content) if isinstance(content, str) else content
    except ValueError as error:
        raise BadRowError(field, f"of a function_call is not valid JSON: {error}.") from error
    return list(parsed) if isinstance(parsed, (list, tuple)) else [parsed]


def _tool_call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRowError(field, 'is not a tool call such as {"function": {"name": "...", "arguments": {...}}}.')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # OpenAI writes arguments as JSON text. Templates apply `tojson`, which would encode the text again.
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise BadRowError(f"{field}.arguments", f"is text that is not valid JSON: {error}.") from error
    if arguments is not None and not isinstance(arguments, Mapping):
        raise BadRowError(f"{field}.arguments", f"is {describe(arguments)}, expected an object.")
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": {**function, "arguments": dict(arguments or {})}}
