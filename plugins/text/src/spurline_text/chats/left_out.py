"""Find what a chat template leaves out of a conversation: tools, tool calls, reasoning, or whole messages.

A template without support for tools renders a tool call as an empty answer, and does not mention the tools. No error
is raised, and the model trains on wrong text. So a row that has these parts is rendered once more, with a marker word
in each part. If a marker is missing from the text, the template leaves out the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline_text.chats.chat import REASONING_KEYS, SPOKEN, ChatRenderer
from spurline_text.rows.formats import Conversation
from spurline_text.rows.messages import Message, assistant_turns
from spurline_text.rows.rows import BadRowError
from spurline_text.tokenizer import template_name


@dataclass(frozen=True)
class LeftOut:
    """A part of a row that the template leaves out. `what` is its kind, for counts. `place` is its path in the row."""

    what: str
    place: str


_Marks = dict[str, LeftOut]
"""The part of a conversation that contains each marker word."""


def find_left_out(
    renderer: ChatRenderer, conversation: Conversation, *, add_generation_prompt: bool = False
) -> list[LeftOut]:
    """Return the parts of the conversation that its rendering does not show.

    Reasoning, and content next to a tool call, are checked only in the last assistant turn, because templates leave
    earlier reasoning out on purpose. If `add_generation_prompt` is true, neither of them is checked.
    """
    last = None if add_generation_prompt else (assistant_turns(conversation.messages) or [None])[-1]
    marks: _Marks = {}
    messages = [_marked(message, index, marks, index == last) for index, message in enumerate(conversation.messages)]
    tools = None if conversation.tools is None else [_marked_tool(tool, marks) for tool in conversation.tools]
    try:
        shown = renderer.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except BadRowError:
        # A template that refuses the marked values has read them, so it does not leave them out.
        return []
    return [part for word, part in marks.items() if word not in shown]


def refuse_left_out(found: Sequence[LeftOut], tokenizer: PreTrainedTokenizerBase, location: str) -> None:
    """If `found` is not empty, raise a DataError that names the row, the fields, the template and a fix."""
    if found:
        what = ", ".join(dict.fromkeys(item.place for item in found))
        raise DataError(
            f"{location}: {what}: the chat template {template_name(tokenizer)} leaves this out, so the model would not "
            "see it. Give a template that writes it (`model.chat_template`: a file, or a name such as chatml), take it "
            "out of the data, or set data.on_ignored: warn."
        )


def _mark(marks: _Marks, what: str, place: str) -> str:
    """Add a new marker word for a part of the conversation to `marks`, and return the word."""
    word = f"spurlinemark{len(marks)}x"
    marks[word] = LeftOut(what, place)
    return word


def _marked(message: Message, index: int, marks: _Marks, is_last: bool) -> Message:
    """Mark the parts of a message that a template may leave out. `is_last` is true for the last assistant turn."""
    marked, place, role = dict(message), f"messages[{index}]", message["role"]
    calls = message.get("tool_calls")
    if calls:
        marked["tool_calls"] = [
            _marked_tool(call, marks, "tool calls", f"{place}.tool_calls[{number}]")
            for number, call in enumerate(calls)
        ]
    if message.get("content") and (role not in SPOKEN or (is_last and calls)):
        what, where = (f"role {role}", f"{place} (role {role})") if role not in SPOKEN else ("content", place)
        marked["content"] = message["content"] + _mark(marks, what, where)
    said = [key for key in REASONING_KEYS if is_last and isinstance(message.get(key), str) and message[key]]
    if said:
        word = _mark(marks, said[0], f"{place}.{said[0]}")
        marked |= {key: message[key] + word for key in said}
    return marked


def _marked_tool(tool: dict[str, Any], marks: _Marks, what: str = "tools", place: str = "tools") -> dict[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return tool
    marked = {**function, "name": function["name"] + _mark(marks, what, place)}
    return {**tool, "function": marked} if "function" in tool else marked
