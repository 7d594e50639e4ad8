"""OpenAI's Responses API.

Items of the input become messages of chat completions. The items of one turn of the model, which are reasoning, a
message and calls, become one message. So a conversation may continue through another API.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from spurline_agents.bodies import Messages, Name, as_functions, kind_of, read_text, unsupported
from spurline_agents.responses import MODEL_NAME, Choice, Conversation, ConversationBody, Dialect
from spurline_agents.sessions import LiveSession
from spurline_text.rows.messages import Message, read_messages
from spurline_text.rows.rows import BadRowError, describe

_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")
_TURN = ("reasoning_content", "content", "tool_calls")
"""The parts of one turn of the model, in the order of their items."""


class ResponsesBody(ConversationBody):
    """A request to `/v1/responses`."""

    unsupported = {
        "tool_choice": ("none", "auto"),
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "truncation": ("disabled",),
        "include": ([], ["reasoning.encrypted_content"]),
        "top_logprobs": (0,),
    }

    input: str | Messages
    instructions: str = ""
    previous_response_id: Name | None = None
    max_tokens: int | None = Field(default=None, ge=1, validation_alias="max_output_tokens")
    text: dict[str, Any] = {}

    def conversation(self, session: LiveSession) -> Conversation:
        if self.text.get("format") not in (None, {"type": "text"}):
            raise unsupported("text.format", self.text["format"])
        before: list[Message] = []
        if self.previous_response_id is not None:
            before, _ = self.goes_on_from(session, self.previous_response_id, "previous_response_id")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [*before, *read_messages(_translated(items), "input")]
        # Neither the instructions nor the tools apply to later requests.
        self._so_far = messages, None
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*system, *messages], as_functions(self.tools, "function", "parameters")


class Responses(Dialect[ResponsesBody]):
    """The API of OpenAI's newer agents. Answers do not repeat the instructions and the tools of the request."""

    kind = ResponsesBody

    def write(self, session: LiveSession, body: ResponsesBody, choices: Sequence[Choice]) -> dict[str, Any]:
        [choice] = choices
        name = _id("resp")
        body.keep(session, name, choice)
        is_cut = choice.finish_reason == "length"
        num_prompt, num_written = len(choice.prompt_ids), len(choice.result.token_ids)
        return {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": body.model or MODEL_NAME,
            "output": _output(choice, "incomplete" if is_cut else "completed"),
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "tool_choice": body.tool_choice,
            "tools": [],
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_written,
            },
        }

    def events(self, body: ResponsesBody, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number, event in enumerate(_events(answer)):
            yield {**event, "sequence_number": number}


def _translated(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items as messages of chat completions."""
    found: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        field = f"input[{number}]"
        kind = kind_of(item, field, "message")
        if kind == "message":
            if item.get("role") not in _ROLES:
                raise BadRowError(f"{field}.role", f"is {describe(item.get('role'))}, expected user or assistant.")
            text = read_text(item.get("content"), f"{field}.content", _TEXTS)
            if item.get("role") == "assistant":
                _turn_for("content", found)["content"] = text
            else:
                found.append({"role": item.get("role"), "content": text})
        elif kind == "reasoning":
            thoughts = read_text(item.get("content") or "", f"{field}.content", ("reasoning_text",))
            _turn_for("reasoning_content", found)["reasoning_content"] = thoughts
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            # An error of the whole conversation could not name the item.
            read_messages([{"role": "assistant", "tool_calls": [call]}], field)
            _turn_for("tool_calls", found).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = read_text(item.get("output"), f"{field}.output", _TEXTS)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            raise BadRowError(f"{field}.type", f"is {kind[:80]!r}, which this endpoint does not support.")
    for message in found:
        message.setdefault("content", "")
    return found


def _turn_for(part: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the turn of the model that an item belongs to: the last message, or a new one at the end of `found`."""
    # A turn may have several calls.
    taken = _TURN[_TURN.index(part) :] if part != "tool_calls" else ()
    if not found or found[-1]["role"] != "assistant" or any(name in found[-1] for name in taken):
        found.append({"role": "assistant"})
    return found[-1]


def _output(choice: Choice, status: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if choice.reasoning:
        thoughts = [{"type": "reasoning_text", "text": choice.reasoning}]
        found.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": thoughts, "status": status})
    if choice.text or not choice.tool_calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        found.append({"type": "message", "id": _id("msg"), "role": "assistant", "content": [part], "status": status})
    for call in choice.tool_calls:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        found.append({"type": "function_call", "id": _id("fc"), "call_id": call["id"], **function, "status": status})
    return found


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream: the response without output, the parts of each item, then the whole response."""
    begun = {**answer, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(answer["output"]):
        place: dict[str, Any] = {"output_index": index}
        is_call = item["type"] == "function_call"
        empty = {"arguments": ""} if is_call else {"content": []}
        yield {"type": "response.output_item.added", "item": {**item, **empty, "status": "in_progress"}, **place}
        own = {"item_id": item["id"], **place}
        if is_call:
            yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"], **own}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **done, **own}
        else:
            [part] = item["content"]
            own["content_index"] = 0
            logprobs = {"logprobs": []} if "logprobs" in part else {}
            yield {"type": "response.content_part.added", "part": {**part, "text": ""}, **own}
            yield {"type": f"response.{part['type']}.delta", "delta": part["text"], **logprobs, **own}
            yield {"type": f"response.{part['type']}.done", "text": part["text"], **logprobs, **own}
            yield {"type": "response.content_part.done", "part": part, **own}
        yield {"type": "response.output_item.done", "item": item, **place}
    yield {"type": f"response.{answer['status']}", "response": answer}
