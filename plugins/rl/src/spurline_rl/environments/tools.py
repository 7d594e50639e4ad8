"""Environment `tools`: a conversation in which the model may call functions before it answers.

Place on the way: chat row -> first messages -> the model's turn -> tool calls in it -> their results as messages -> the
next turn ... -> a turn without calls is the answer -> reward terms -> Trajectory with one Turn per model turn.

A call is written as `<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>`; a turn may
have several. Everything that goes wrong with a call is answered with a text that begins with `error:`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import DataError, PluginError, SpurlineError, listing
from spurline.plugins.registry import Registry
from spurline_rl.chat_front import ChatFront, PrefixError, Reply, opening_ids
from spurline_rl.concurrency import within
from spurline_rl.environments.configs import BUILT_IN_TOOLS, ToolsConfig
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.references import check_reference
from spurline_rl.scoring import close_all, make_rewards, reward_terms
from spurline_rl.trajectory import Trajectory
from spurline_text.chats.chat import ChatRenderer
from spurline_text.chats.left_out import find_left_out, refuse_left_out
from spurline_text.encoding import require_chat_template
from spurline_text.prompts import ChatQuestion, read_question
from spurline_text.rows.formats import Conversation
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import BadRowError

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_EXCHANGE: list[Message] = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": '<tool_call>{"name": "a_tool", "arguments": {}}</tool_call>'},
    {"role": "tool", "name": "a_tool", "content": "a result"},
]
"""A conversation with a tool, to test whether the chat template renders tools."""
_SHOWN_NAME = 80
"""Characters that a message shows of a name that no tool has."""
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
    """Return what the model is told."""

    name: str
    text: str
    failed: bool

    def cut_to(self, characters: int) -> ToolResult:
        """The beginning of it, and a note that the rest is missing, where it is longer."""
        if len(self.text) <= characters:
            return self
        note = f"(cut: {len(self.text):,} characters, more than a turn's results may have)"
        return replace(self, text=f"{self.text[:characters]}\n{note}")

    def message(self) -> dict[str, str]:
        """The result as a message of the conversation."""
        return {"role": "tool", **({"name": self.name} if self.name else {}), "content": self.text}


def parse_calls(text: str, limit: int | None = None) -> list[ToolCall]:
    """The calls in a turn's text, in order. limit: of more, the first so many and one whose problem says that."""
    found = islice(_CALL.finditer(text), None if limit is None else limit + 1)
    bodies = [(match[1], bool(match[2])) for match in found]
    calls = [_parse(body, is_closed=is_closed) for body, is_closed in bodies[:limit]]
    if len(bodies) > len(calls):
        calls.append(ToolCall("", {}, f"a turn may have {limit} tool calls; the others were not made."))
    return calls


class Toolbox:
    """Functions by the names that the model calls them with.

    Args:
        paths: Name -> what `load_function` takes, or the name of a built-in tool. A function gets the call's arguments
            by name; what it returns is told as text. It may be async; it may run several times at once.
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
        problem, name = call.problem or self._problem(call), _encodable(call.name[:_SHOWN_NAME])
        if not problem:
            try:
                function = self._functions[call.name]
                value = await within(self._timeout_s, f"the tool {call.name}", function, **call.arguments)
                return ToolResult(name, _encodable(value if isinstance(value, str) else _as_text(value)), failed=False)
            except AttemptFailedError as error:
                problem = str(error)
            except SpurlineError:
                raise
            except Exception as error:  # noqa: BLE001 - told to the model
                problem = f"{type(error).__name__}: {error}"
        return ToolResult(name, _encodable(f"error: {problem}"), failed=True)

    def _problem(self, call: ToolCall) -> str:
        if call.name not in self._functions:
            return f"there is no tool '{call.name[:_SHOWN_NAME]}'. Tools: {listing(self._functions)}."
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
    except (ValueError, RecursionError) as error:
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


def _encodable(text: str) -> str:
    """`text` with `?` for halves of surrogate pairs, which JSON can hold and no tokenizer or file takes."""
    return text.encode(errors="replace").decode()


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


class Tools:
    """Runs conversations with tools.

    A row is asked up to its last question; the calls that it shows after that, if any, are not given away, and its last
    assistant turn is the reference. The template shows the model the row's own tools where it has some, otherwise the
    configured ones.

    `info`: prompt, response (the last turn) and reference as texts; messages; `ended` with `answer`, `max_turns`,
    `length` (a turn was cut off) or `context` (no room for another turn); calls and failed_calls.
    """

    def __init__(
        self, config: ToolsConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._toolbox = Toolbox(config.tools, config.tool_timeout_s)
        self._schemas = self._toolbox.schemas()
        self._refuses_left_out = data.on_ignored == "error"
        if self._refuses_left_out:
            self._require_shown(_EXCHANGE, self._schemas, "environment tools")
        self._rewards = make_rewards(config.rewards, registry)

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        question = self._read(task)
        messages, tools = self._opening(question, task.location)
        chat = ChatFront(
            policy,
            self._tokenizer,
            messages,
            tools=tools,
            history=self._config.history,
            where=f"{task.location} (prompt {task.uid}, sample {task.sample})",
        )
        ended, calls, failed = await self._converse(chat)
        answer = self._answer(chat, policy, question.reference, task)
        info = {
            "prompt": answer.prompt,
            "response": answer.response,
            "reference": answer.reference,
            "messages": list(chat.messages),
            "ended": ended,
            "calls": sum(calls),
            "failed_calls": sum(failed),
        }
        penalties = [self._config.failed_call_reward if number else 0.0 for number in failed]
        terms = await reward_terms(self._rewards, answer)
        return policy.finish(terms, turn_rewards=penalties if any(penalties) else None, info=info)

    def first_prompt(self, task: Task) -> Sequence[int]:
        """See `ShowsPrompt`."""
        question = self._read(task)
        check_reference(self._config.rewards, question.reference, task.row)
        messages, tools = self._opening(question, task.location)
        return opening_ids(self._tokenizer, messages, tools, where=task.location)

    def close(self) -> None:
        """Close the rewards."""
        close_all(self._rewards)

    def _opening(self, question: ChatQuestion, where: str) -> tuple[Sequence[Message], list[dict[str, Any]]]:
        """How the conversation begins, and the tools that it is shown with. Raises DataError as of `_require_shown`."""
        begun = question.messages[: _count_beginning(question.messages, question.answer_at)]
        tools = question.tools or self._schemas
        if self._refuses_left_out:
            self._require_shown(begun, tools, where)
        return begun, tools

    def _require_shown(self, messages: Sequence[Message], tools: list[dict[str, Any]], where: str) -> None:
        """Raise DataError when the chat template leaves out the tools, their results or another message."""
        require_chat_template(self._tokenizer, where)
        renderer = ChatRenderer(self._tokenizer)
        conversation = Conversation([*messages], tools)
        try:
            renderer.render(messages, tools, add_generation_prompt=True)
        except BadRowError as error:
            raise error.at(where) from error
        found = find_left_out(renderer, conversation, add_generation_prompt=True)
        refuse_left_out(found, self._tokenizer, where)

    async def _converse(self, chat: ChatFront) -> tuple[str, Sequence[int], Sequence[int]]:
        """Talk until an answer or a limit. Returns how it ended, and per turn the numbers of calls and failed calls."""
        calls: list[int] = []
        failed: list[int] = []
        while True:
            reply = await self._reply(chat, is_first=not calls)
            if reply is None:
                return "context", calls, failed
            found = parse_calls(reply.text, self._config.max_calls_per_turn)
            was_cut = reply.result.finish_reason == "length"
            calls.append(len(found))
            failed.append(0)
            if not found or was_cut:
                return "length" if was_cut else "answer", calls, failed
            if len(calls) == self._config.max_turns:
                return "max_turns", calls, failed
            characters = self._config.max_result_characters
            for call in found:
                result = (await self._toolbox.answer(call)).cut_to(characters)
                characters = max(0, characters - len(result.text))
                failed[-1] += result.failed
                chat.add(result.message())

    async def _reply(self, chat: ChatFront, *, is_first: bool) -> Reply | None:
        """The model's turn, or None when the conversation has grown out of the model's context."""
        try:
            return await chat.reply()
        except PrefixError:
            raise
        except DataError:
            # A row that is too long from the start is the data's fault; later on it is how the attempt went.
            if is_first:
                raise
            return None

    def _answer(self, chat: ChatFront, policy: PolicyHandle, reference: str | None, task: Task) -> Answer:
        first, last = policy.turns[0], policy.turns[-1]
        prompt = str(self._tokenizer.decode(first.prompt_ids.tolist(), skip_special_tokens=False))
        response = str(self._tokenizer.decode(last.response_ids.tolist(), skip_special_tokens=True))
        return Answer(prompt, response, reference, task.row, chat.messages)

    def _read(self, task: Task) -> ChatQuestion:
        """The row as a conversation. Raises DataError for any other."""
        try:
            has_template = self._tokenizer.chat_template is not None
            question = read_question(task.row, task.dataset, has_chat_template=has_template)
        except BadRowError as error:
            raise error.at(task.location) from error
        except DataError as error:
            raise DataError(f"{task.location}: {error}") from error
        if not isinstance(question, ChatQuestion):
            raise DataError(
                f"{task.location}: this row is plain text and no conversation; the environment tools needs chat rows "
                "('messages'), a list of messages as prompt, or alpaca rows."
            )
        return question


def _count_beginning(messages: Sequence[Message], answer_at: int) -> int:
    """Number of messages up to the last of the user before the answer; all before the answer when there is none."""
    asked = [index for index in range(answer_at) if messages[index]["role"] == "user"]
    return asked[-1] + 1 if asked else answer_at
