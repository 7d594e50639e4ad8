"""Anthropic's Messages API.

The blocks of a message become messages of chat completions: results of tools become messages of tools, `tool_use`
becomes tool calls, and `thinking` becomes `reasoning_content`. So a conversation may continue through another API.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import Field

from spurline_agents.bodies import (
    ApiError,
    Messages,
    as_functions,
    kind_of,
    read_body,
    read_part,
    read_text,
    unsupported,
)
from spurline_agents.responses import MODEL_NAME, Choice, Conversation, ConversationBody, Dialect, errors_as_api_errors
from spurline_agents.sessions import LiveSession
from spurline_text.rows.messages import Message, read_messages

_BILLING = "x-anthropic-billing-header"
"""Claude Code begins its system prompt with a block that begins so and is different in each request."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CountBody(ConversationBody):
    """A request to `/v1/messages/count_tokens`."""

    unsupported = {"container": (), "mcp_servers": ([],), "output_format": ()}

    messages: Messages
    system: str | list[dict[str, Any]] = ""
    tool_choice: dict[str, Any] = {"type": "auto"}
    thread: dict[str, Any] = {}
    output_config: dict[str, Any] = {}

    def conversation(self, session: LiveSession) -> Conversation:
        if self.tool_choice.get("type") not in ("auto", "none"):
            raise unsupported("tool_choice", self.tool_choice)
        if self.output_config.get("format") is not None:
            raise unsupported("output_config.format", self.output_config["format"])
        if self.messages[-1].get("role") == "assistant":
            text = "messages: the last message is the assistant's. This endpoint does not continue a turn."
            raise ApiError(400, text, param="messages", code="unsupported_parameter")
        if self.thread.get("type") == "continue":
            # The system prompt and the tools are those of the thread.
            before, tools = self.goes_on_from(session, self.thread.get("previous_message_id"), "thread")
        else:
            before = self._system()
            tools = as_functions(self.tools, "custom", "input_schema")
        found: list[Message] = []
        for number, message in enumerate(self.messages):
            field = f"messages[{number}]"
            found += read_messages(_translated(message, field), field)
        self._so_far = [*before, *found], tools
        return self._so_far

    def _system(self) -> list[Message]:
        blocks = self.system if isinstance(self.system, list) else [{"type": "text", "text": self.system}]
        text = read_text([block for block in blocks if not str(block.get("text")).startswith(_BILLING)], "system")
        return [{"role": "system", "content": text}] if text else []


class MessagesBody(CountBody):
    """A request to `/v1/messages`."""

    max_tokens: int | None = Field(ge=1)


class AnthropicMessages(Dialect[MessagesBody]):
    """The API of Claude."""

    kind = MessagesBody

    def count_tokens(self, session: LiveSession, raw: bytes) -> int:
        """Return the number of tokens of the prompt of a `CountBody`. This may run on a thread."""
        body = read_body(raw, CountBody, self.config)
        with errors_as_api_errors():
            messages, tools = body.conversation(session)
            chat, _ = session.find(messages, tools, begins=False)
            return len(chat.open_turn())

    def write(self, session: LiveSession, body: MessagesBody, choices: Sequence[Choice]) -> dict[str, Any]:
        [choice] = choices
        _, stopped_by = self.text(choice.result, body)
        name = f"msg_{secrets.token_hex(12)}"
        if body.thread:
            body.keep(session, name, choice)
        return {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": body.model or MODEL_NAME,
            "content": _content(choice),
            "stop_reason": "stop_sequence" if stopped_by is not None else _STOP_REASONS[choice.finish_reason],
            "stop_sequence": stopped_by,
            "usage": {
                "input_tokens": len(choice.prompt_ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": len(choice.result.token_ids),
            },
        }

    def events(self, body: MessagesBody, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the message without content, the parts of each block, and why the message has ended."""
        usage = answer["usage"]
        begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
        yield {"type": "message_start", "message": {**answer, **begun}}
        for index, block in enumerate(answer["content"]):
            if block["type"] == "tool_use":
                empty: dict[str, Any] = {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            else:
                # The parts of a text are called like the type of their block.
                name = block["type"]
                empty, delta = {name: ""}, {"type": f"{name}_delta", name: block[name]}
            yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}
        yield {"type": "message_stop"}


def _translated(message: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Return a message of this API as messages of chat completions."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and role in ("user", "assistant"):
        # A list of pairs would be tens of thousands of objects for the garbage collector.
        blocks = ((block, f"{field}.content[{place}]") for place, block in enumerate(cast("list[Any]", content)))
        return _of_user(blocks) if role == "user" else [_of_assistant(blocks)]
    return [{"role": role, "content": read_text(content, f"{field}.content")}]


def _of_user(blocks: Iterable[tuple[Any, str]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for block, field in blocks:
        if kind_of(block, field) == "tool_result":
            content = read_text(block.get("content") or "", f"{field}.content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
            continue
        if not found or found[-1]["role"] != "user":
            found.append({"role": "user", "content": []})
        found[-1]["content"].append(read_part(block, field))
    return found or [{"role": "user", "content": ""}]


def _of_assistant(blocks: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, field in blocks:
        kind = kind_of(block, field)
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(read_part(block, field))
    reasoning = {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return {"role": "assistant", "content": texts, **reasoning, **({"tool_calls": calls} if calls else {})}


def _content(choice: Choice) -> list[dict[str, Any]]:
    """Return the blocks of an answer. Some clients read the text of the first one, so there is at least one block."""
    found: list[dict[str, Any]] = []
    if choice.reasoning:
        found.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text or not choice.tool_calls:
        found.append({"type": "text", "text": choice.text})
    for call in choice.tool_calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        found.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return found
