"""Environment `tools`: a conversation in which the model may call functions before it answers.

Data flow: chat row -> first messages -> the model's turn -> tool calls in it -> their results as messages -> the
next turn ... -> an answer without calls -> reward terms -> Trajectory with one Turn per model turn.

A tool format reads the calls in a turn, which may have several. The result of a call that fails is a text that begins
with `error:`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import ConfigError, DataError, PluginError, SpurlineError, listing
from spurline.plugins.registry import Registry
from spurline_concurrency.calls import within
from spurline_environments.configs import BUILT_IN_TOOLS, ToolsConfig
from spurline_environments.grammars import Schemas, ToolCall
from spurline_environments.tool_formats import Turns, call_metrics, readable, result_message
from spurline_rl.chat_front import ChatFront
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.protocols.reward import Answer
from spurline_rl.protocols.rollout_engine import Sampling
from spurline_rl.rewards.matching import check_reference
from spurline_rl.scoring import close_all, make_rewards, reward_terms
from spurline_rl.trajectory import Trajectory
from spurline_text.chats.chat import ChatRenderer
from spurline_text.chats.left_out import find_left_out, refuse_left_out
from spurline_text.encoding import require_chat_template
from spurline_text.prompts import ChatQuestion, read_question
from spurline_text.rows.formats import Conversation
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import BadRowError
from spurline_text.tokenizer import template_name

MAX_RESULT_CHARACTERS = 2**18
"""Largest number of characters in all results of one turn."""
_SHOWN_NAME = 80
"""Characters of an unknown tool's name that a message shows."""


class Toolbox:
    """The functions that the model may call.

    Args:
        paths: Maps each tool's name to a path for `load_function` or to a built-in tool. A function gets the call's
            arguments by name, and may be async. The model gets the function's result as text. Several calls may run at
            the same time.
        timeout_s: Seconds that a call may take.
    """

    def __init__(self, paths: Mapping[str, str], timeout_s: float) -> None:
        self._functions = {
            name: load_function(BUILT_IN_TOOLS.get(path, path), f"tool '{name}'") for name, path in paths.items()
        }
        self._signatures = {name: _signature(name, function) for name, function in self._functions.items()}
        self._timeout_s = timeout_s

    def schemas(self) -> list[dict[str, Any]]:
        """Return JSON schemas of the tools for chat templates, from signatures and docstrings."""
        return [_schema(name, function, self._signatures[name]) for name, function in self._functions.items()]

    async def answer(self, call: ToolCall) -> tuple[str, bool]:
        """Make the call. Returns the text for the model, and whether the call failed.

        Raises:
            SpurlineError: If the tool raises one other than AttemptFailedError, since the model did not cause it.
        """
        problem = call.problem or self._problem(call)
        if not problem:
            try:
                function = self._functions[call.name]
                value = await within(self._timeout_s, f"the tool {call.name}", function, **call.arguments)
                return _encodable(value if isinstance(value, str) else _as_text(value)), False
            except AttemptFailedError as error:
                problem = str(error)
            except SpurlineError:
                raise
            except Exception as error:  # noqa: BLE001 - the model gets it
                problem = f"{type(error).__name__}: {error}"
        return _encodable(f"error: {problem}"), True

    def _problem(self, call: ToolCall) -> str:
        if call.name not in self._functions:
            return f"there is no tool '{call.name[:_SHOWN_NAME]}'. Tools: {listing(self._functions)}."
        try:
            self._signatures[call.name].bind(**call.arguments)
        except TypeError as error:
            return f"{call.name}: {error}."
        return ""


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def _encodable(text: str) -> str:
    """Replace unpaired surrogates. JSON may have them, but tokenizers and files refuse them."""
    return text.encode(errors="replace").decode()


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        with suppress(Exception):
            return inspect.signature(function, eval_str=True)
        # Some annotations are no expressions, or have names that are imported for type checkers alone.
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(f"The tool '{name}' has no readable signature: {error}. Wrap it in a function.") from error


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


def _schema_of(parameter: inspect.Parameter) -> dict[str, Any]:
    """Return the schema of a parameter, or an empty one if its annotation has none."""
    with suppress(Exception):
        return TypeAdapter(parameter.annotation).json_schema()
    return {}


@dataclass(frozen=True)
class _Ended:
    """The end of a conversation: its reason, the last answer, all calls, and each turn's number of failed calls."""

    why: str
    response: str
    calls: Sequence[ToolCall]
    failed: Sequence[int]


class Tools:
    """Runs conversations with tools.

    The first prompt has the row's messages up to its last question. The row's last assistant turn is the reference. The
    template shows the tools of the row, or the configured tools if the row has none.

    `info` has prompt, response (the last turn without reasoning and calls) and reference as texts; messages; calls and
    failed_calls; metrics; and `ended`, which is `answer`, `max_turns`, `length` (a turn was cut off), `context`
    (another turn does not fit) or `refused` (the template refuses what the model wrote).
    """

    def __init__(
        self, config: ToolsConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._toolbox = Toolbox(config.tools, config.tool_timeout_s)
        self._schemas = self._toolbox.schemas()
        self._turns = Turns(config.tool_format, registry, tokenizer)
        self.notes = self._turns.notes
        self._refuses_left_out = data.on_ignored == "error"
        if self._refuses_left_out:
            self._require_shown(self._turns.exchange, self._schemas, "environment tools")
        self._rewards = make_rewards(config.rewards, registry)

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        question = self._read(task)
        messages, tools = self._opening(question, task.location)
        where = f"{task.location} (prompt {task.uid}, sample {task.sample})"
        agree = partial(self._turns.agree, tools=tools)
        history = self._config.history
        chat = ChatFront(policy, self._tokenizer, messages, tools=tools, history=history, where=where, agree=agree)
        end = await self._converse(chat, tools, self._turns.sampling(policy.sampling))
        prompt = str(self._tokenizer.decode(policy.turns[0].prompt_ids.tolist(), skip_special_tokens=False))
        answer = Answer(prompt, end.response, question.reference, task.row, chat.messages)
        info = {
            "prompt": prompt,
            "response": end.response,
            "reference": answer.reference,
            "messages": list(chat.messages),
            "ended": end.why,
            "calls": len(end.calls),
            "failed_calls": sum(end.failed),
        }
        penalties = [self._config.failed_call_reward if number else 0.0 for number in end.failed]
        terms = await reward_terms(self._rewards, answer)
        counts = {**call_metrics(end.calls, sum(end.failed)), "turns/forked": chat.num_forked}
        info["metrics"] = {**counts, **answer.metrics}
        return policy.finish(terms, turn_rewards=penalties if any(penalties) else None, info=info)

    def first_prompt(self, task: Task) -> Sequence[int]:
        """See `ShowsPrompt`."""
        question = self._read(task)
        check_reference(self._config.rewards, question.reference, task.row)
        messages, tools = self._opening(question, task.location)
        return ChatFront(None, self._tokenizer, messages, tools=tools, where=task.location).open_turn()

    def close(self) -> None:
        close_all(self._rewards)

    def _opening(self, question: ChatQuestion, where: str) -> tuple[Sequence[Message], list[dict[str, Any]]]:
        """Return the messages up to the last question, and the tools."""
        messages, end = question.messages, question.answer_at
        asked = [index for index in range(end) if messages[index]["role"] == "user"]
        begun = messages[: asked[-1] + 1 if asked else end]
        tools = question.tools or self._schemas
        if self._refuses_left_out:
            self._require_shown(begun, tools, where)
        return begun, tools

    def _require_shown(self, messages: Sequence[Message], tools: list[dict[str, Any]], where: str) -> None:
        """Raise an error if the chat template leaves out the tools, their results or another message."""
        require_chat_template(self._tokenizer, where)
        renderer = ChatRenderer(self._tokenizer)
        try:
            renderer.render(messages, tools, add_generation_prompt=True)
        except BadRowError as error:
            raise error.at(where) from error
        found = find_left_out(renderer, Conversation([*messages], tools), add_generation_prompt=True)
        if tools is self._schemas and any(part.what == "tools" for part in found):
            raise ConfigError.at(
                "source.environment.tools",
                f"are not shown by the template {template_name(self._tokenizer)}. Set model.chat_template: chatml.",
            )
        refuse_left_out(found, self._tokenizer, where)

    async def _converse(self, chat: ChatFront, tools: Schemas, sampling: Sampling) -> _Ended:
        """Let the model take turns."""
        calls: list[ToolCall] = []
        failed: list[int] = []
        response = ""
        while True:
            reply = await chat.reply_if_possible(sampling)
            if isinstance(reply, str):
                return _Ended(reply, response, calls, failed)
            turn = self._turns.read(reply.text, tools, len(chat.messages))
            response = readable(reply, turn, self._tokenizer)
            failed.append(0)
            if reply.result.finish_reason == "length":
                return _Ended("length", response, calls, failed)
            calls += turn.calls
            chat.restate(self._turns.message(reply.text, turn))
            if not turn.calls or len(failed) == self._config.max_turns:
                failed[-1] = sum(bool(call.problem) for call in turn.calls)
                return _Ended("max_turns" if turn.calls else "answer", response, calls, failed)
            left = MAX_RESULT_CHARACTERS
            for call in turn.calls:
                text, has_failed = await self._toolbox.answer(call)
                if len(text) > left:
                    text = f"{text[:left]}\n(cut: {len(text):,} characters, more than a turn's results may have)"
                left = max(0, left - len(text))
                failed[-1] += has_failed
                chat.add(result_message(replace(call, name=_encodable(call.name[:_SHOWN_NAME])), text))

    def _read(self, task: Task) -> ChatQuestion:
        """Return the row as a conversation. Raises DataError for a row of plain text."""
        question = read_question(task.row, task.dataset)
        if not isinstance(question, ChatQuestion):
            raise DataError(
                "this row is plain text, but the environment tools needs chat rows ('messages'), a list of messages as "
                "prompt, or alpaca rows."
            )
        return question
