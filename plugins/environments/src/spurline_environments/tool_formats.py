"""Kind `tool_format`: read the model's turns as reasoning, content and tool calls, and write them as messages.

Data flow: text of a turn -> ParsedTurn -> the message that the chat template takes. The template's text of this message
is only compared with the model's own text; the tokens of the turn stay those that were sampled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from spurline.errors import ConfigError, listing
from spurline.plugins.registry import Registry
from spurline_environments.configs import AutoFormatConfig, ToolFormatConfig
from spurline_environments.grammars import GRAMMARS, ParsedTurn, Schemas, ToolCall
from spurline_rl.chat_front import Reply
from spurline_rl.protocols.rollout_engine import Sampling
from spurline_text.chats.chat import REASONING_KEYS, ChatRenderer
from spurline_text.rows.messages import Message
from spurline_text.rows.rows import BadRowError
from spurline_text.tokenizer import template_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Callable[[Mapping[str, Any]], Any]
"""Makes the arguments of a call for a message."""
_QUESTION: Message = {"role": "user", "content": "a question"}
_TOOL = "spurlinetool"
_SCHEMA = {"type": "function", "function": {"name": _TOOL, "description": "", "parameters": {"type": "object"}}}


class ToolFormat(Protocol):
    """Reads what a model writes. Factory: `Class(config, tokenizer=PreTrainedTokenizerBase)`.

    Parsing is a pure function, and equal on all machines. A format may have `ends`, the texts of tokens that end a turn
    besides the tokenizer's end token.
    """

    def parse(self, text: str, tools: Schemas = ()) -> ParsedTurn:
        """Return the parts of a turn.

        Args:
            text: The whole turn with special tokens, without its end token.
            tools: JSON schemas of the tools. Formats whose arguments have no types read the types here.

        A call that cannot be read is a ToolCall with a `problem`. Text without any mark of the format is the content,
        unchanged. This method raises no errors.
        """
        ...


class MarkedFormat:
    """A format of this package: `config.name` chooses its grammar."""

    def __init__(self, config: ToolFormatConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._grammar = GRAMMARS[config.name]
        self.ends = self._grammar.ends
        prompt = _render(tokenizer, [_QUESTION], add_generation_prompt=True)
        self._is_thinking = prompt.rstrip().endswith(("<think>", "[THINK]"))

    def parse(self, text: str, tools: Schemas = ()) -> ParsedTurn:
        return self._grammar.parse(text, tools, is_thinking=self._is_thinking)


def choose_format(config: AutoFormatConfig, tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Return the format of the tokenizer's chat template. See `name_of_format`."""
    return MarkedFormat(ToolFormatConfig(name=name_of_format(tokenizer)[0]), tokenizer)


def name_of_format(tokenizer: PreTrainedTokenizerBase, *, has_tools: bool = False) -> tuple[str, str]:
    """Return the format whose marks the chat template has, and a reason in words; hermes and "" if it has none.

    Raises:
        ConfigError: If the model has tools, and the template shows them, but has no marks of a known format.
    """
    source = "" if tokenizer.chat_template is None else tokenizer.get_chat_template(tools=[_SCHEMA])  # type: ignore[arg-type]
    for name, grammar in GRAMMARS.items():
        for mark in grammar.marks:
            if mark in source:
                return name, f"the chat template {template_name(tokenizer)} has `{mark}`"
    if has_tools and re.search(r"\btools\b", source):
        raise ConfigError.at(
            "source.environment.tool_format",
            f"is 'auto', but the chat template {template_name(tokenizer)} shows tools in none of the known formats: "
            f"{listing(GRAMMARS)}. Set the model's format, or {{name: vllm, parser: NAME}} for a parser of vLLM, or "
            "hermes for <tool_call> with JSON.",
        )
    return "hermes", ""


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **how: bool) -> str:
    """Return the template's text of a conversation that tests the template, or "" if the template refuses it."""
    with suppress(BadRowError):
        return "" if tokenizer.chat_template is None else ChatRenderer(tokenizer).render(messages, [_SCHEMA], **how)
    return ""


class Turns:
    """Reads the model's turns with a tool format, and writes them in the shape that the chat template takes.

    A few short conversations, rendered at the start, show whether the template writes tool calls, whether it takes
    their arguments as an object or as JSON text, and under which key it takes reasoning.

    Attributes:
        notes: Sentences for `spurline plan` and for the start of a run.
        exchange: A conversation with a call and its result, to test the chat template.
    """

    def __init__(
        self, config: ToolFormatConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, has_tools: bool = True
    ) -> None:
        self._format: ToolFormat = registry.create("tool_format", config, tokenizer=tokenizer)
        name, why = config.name, "the config names it"
        if name == "auto":
            name, why = name_of_format(tokenizer, has_tools=has_tools)
        self.notes = (f"tool calls: format {name}, since {why}",) if why else ()

        def shown(said: Mapping[str, Any], form: Form | None = None, num_calls: int = 1) -> str:
            answered = [_QUESTION, {"role": "assistant", **said}]
            return _render(tokenizer, _exchange(form, num_calls, **said) if form else answered)

        thought = "spurlinethought"
        self._key = next((key for key in REASONING_KEYS if thought in shown({"content": "", key: thought})), None)
        # A template that joins texts would show an object as Python writes it.
        forms: tuple[Form, ...] = (dict, json.dumps)
        takes = (form for form in forms if "spurlinevalue0" in (text := shown({}, form)) and "{'" not in text)
        self._form = next(takes, None)
        # Some templates refuse a second call, or leave it out.
        self._takes_many = "spurlinevalue1" in shown({}, self._form, num_calls=2)
        both = {"content": "a text", self._key or "reasoning": "a thought"}
        self._takes_both = bool(shown(both, self._form))
        self.exchange = _exchange(self._form)
        special: dict[str, int] = cast(Any, tokenizer).get_added_vocab()
        self._ends = [special[end] for end in getattr(self._format, "ends", ()) if end in special]

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling of a turn, which ends at the format's end tokens too."""
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *self._ends))

    def read(self, text: str, tools: Schemas = (), place: int = 0) -> ParsedTurn:
        """Return the parts of a turn, in which every call has an id. `place` is the turn's place among the messages."""
        turn = self._format.parse(text, tools)
        # Mistral's template takes only ids of nine letters and digits. A run that is repeated makes the same ids.
        ids = [f"{place} {number} {text}".encode(errors="replace") for number in range(len(turn.calls))]
        calls = [
            replace(call, id=call.id or hashlib.blake2b(id).hexdigest()[:9])
            for call, id in zip(turn.calls, ids, strict=True)
        ]
        return replace(turn, calls=tuple(calls))

    def message(self, text: str, turn: ParsedTurn) -> Message:
        """Return the turn as a message for the chat template. What the template does not take apart stays text."""
        form = self._form if self._takes_many or len(turn.calls) == 1 else None
        if turn.calls and form is None:
            return {"role": "assistant", "content": text}
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.reasoning is not None and self._key is None:
            message["content"] = f"<think>\n{turn.reasoning}\n</think>\n\n{turn.content}" if turn.calls else text
        elif turn.reasoning is not None and self._key is not None:
            message[self._key] = turn.reasoning
            if turn.calls and turn.content and not self._takes_both:
                message |= {"content": "", self._key: f"{turn.reasoning}\n{turn.content}"}
        if turn.calls and form is not None:
            message["tool_calls"] = [as_openai(call, form) for call in turn.calls]
        return message

    def agree(self, written: str, shown: str, tools: Schemas = ()) -> bool:
        """Return whether the text of a turn that the template writes says the same as the model's own text.

        If the model wrote a malformed call, which no template repeats, the calls are not compared.
        """
        mine, other = (self._format.parse(text, tools) for text in (written, shown))
        if any(call.problem for call in mine.calls):
            other = replace(other, calls=mine.calls)
        return _essence(mine) == _essence(other)


def result_message(call: ToolCall, text: str) -> Message:
    """Return the result of a call as a message."""
    return {"role": "tool", **({"name": call.name} if call.name else {}), "tool_call_id": call.id, "content": text}


def as_openai(call: ToolCall, form: Form = json.dumps) -> dict[str, Any]:
    """Return a call as it stands in a message. `form` makes the arguments, which are JSON text in OpenAI's API."""
    # Templates and tokenizers refuse halves of surrogate pairs, which JSON may have.
    text = json.dumps([call.name, dict(call.arguments)], ensure_ascii=False).encode(errors="replace").decode()
    name, arguments = json.loads(text)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": form(arguments)}}


def readable(reply: Reply, turn: ParsedTurn, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what a reward or a client reads of a turn: the content, without special tokens."""
    if turn.content != reply.text:
        return turn.content
    return str(tokenizer.decode(reply.result.token_ids.tolist(), skip_special_tokens=True))


def call_metrics(calls: Sequence[ToolCall], num_failed: int | None = None) -> dict[str, float]:
    """Return the metrics of an attempt's calls: their number, and which share was malformed or failed."""
    if not calls:
        return {"tools/calls": 0}
    failed = {} if num_failed is None else {"tools/failed": num_failed / len(calls)}
    unparsed = sum(bool(call.problem) for call in calls)
    return {"tools/calls": len(calls), "tools/unparsed": unparsed / len(calls), **failed}


def _exchange(form: Form | None, num_calls: int = 1, **said: Any) -> list[Message]:
    """Return a conversation with calls and their results. Without `form`, it has no calls."""
    made = [ToolCall(_TOOL, {"key": f"spurlinevalue{n}"}, id=f"{n:09}") for n in range(num_calls)]
    calls = {"tool_calls": [as_openai(call, form) for call in made]} if form else {}
    results = [result_message(call, "a result") for call in made]
    return [_QUESTION, {"role": "assistant", "content": "", **said, **calls}, *results]


def _essence(turn: ParsedTurn) -> tuple[str, str, Any]:
    calls = [(call.name, dict(call.arguments)) for call in turn.calls]
    return (turn.reasoning or "").strip(), turn.content.strip(), calls
