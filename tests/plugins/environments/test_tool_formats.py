"""Tool formats: for each family, conversations with its own kind of template go round, and its calls are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rl_attempts import core_registry, decode, encode, extends, make_policy, run, says
from tool_families import CALLS, FAMILIES, SCHEMAS, tokenizer_of
from transformers import PreTrainedTokenizerBase

import spurline_text
from spurline.errors import ConfigError
from spurline_environments.configs import AutoFormatConfig, ToolFormatConfig
from spurline_environments.grammars import GRAMMARS, ToolCall, read_call
from spurline_environments.plugin import FORMATS
from spurline_environments.testing import ToolFormatContract
from spurline_environments.tool_formats import Turns, name_of_format, result_message
from spurline_rl.chat_front import ChatFront
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_text.testing.inputs import tiny_tokenizer

REGISTRY = core_registry()
TEMPLATES = Path(spurline_text.__path__[0]) / "chats" / "templates"


def turns_of(name: str, tokenizer: PreTrainedTokenizerBase) -> Turns:
    return Turns(AutoFormatConfig(), REGISTRY, tokenizer)


@pytest.mark.parametrize("is_thinking", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_a_conversation_with_calls_are_those_sampled_with_thinking_kept_and_dropped(
    name: str, is_thinking: bool
) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    turns = turns_of(name, tokenizer)
    assert turns.notes[0].startswith(f"tool calls: format {name}, since the chat template")
    end_of_call, end = family.special.split()[:2]
    thought = family.thought[not is_thinking]
    call, answer = (text.replace("THOUGHT", thought) for text in (family.call, family.answer))
    written = [call + end_of_call, answer + end, answer + end]
    policy = make_policy(ScriptedEngine(says(tokenizer, *written, end=False)), max_new_tokens=2000)
    question = {"role": "user", "content": "add"}
    chat = ChatFront(policy, tokenizer, [question], tools=SCHEMAS, agree=partial(turns.agree, tools=SCHEMAS))
    shown: list[str] = []

    async def reply() -> Any:
        messages: Any = [*chat.messages]
        text = tokenizer.apply_chat_template(messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
        shown.append(str(text))
        taken = await chat.reply()
        turn = turns.read(taken.text, SCHEMAS, len(chat.messages))
        chat.restate(turns.message(taken.text, turn))
        assert bool(turn.reasoning) == bool(is_thinking and thought)
        return turn

    async def talk() -> None:
        turn = await reply()
        assert [(made.name, made.arguments) for made in turn.calls] == CALLS[: family.num_calls]
        assert turn.content == ("Look." if "Look." in call else "")
        chat.add(*(result_message(made, "4 2") for made in turn.calls))
        assert (await reply()).content == "42"
        chat.add(question)
        assert (await reply()).calls == ()

    run(talk())
    for turn, text in zip(policy.turns, written, strict=True):
        assert turn.response_ids.tolist() == encode(tokenizer, text)
    first, second, third = policy.turns
    assert chat.num_forked == family.forks[not is_thinking]
    # A prompt has the tokens of the turns before it, or else it is the template's own text.
    for before, after, text in ((first, second, shown[1]), (second, third, shown[2])):
        assert extends(before, after) or decode(tokenizer, after.prompt_ids) == text
        # What follows the last turn of the model is as the template writes it. gpt-oss ends a turn by another token.
        added = decode(tokenizer, after.prompt_ids).rpartition("4 2")[2].replace("<|return|>", "")
        assert text.endswith(added)
    assert extends(second, third) == (chat.num_forked == 0)


@pytest.mark.parametrize("name", FORMATS)
class TestFormats(ToolFormatContract):
    @pytest.fixture(autouse=True)
    def _family(self, name: str) -> None:
        self.name = name

    def make_format(self, tokenizer: Any) -> Any:
        return REGISTRY.create("tool_format", ToolFormatConfig(name=self.name), tokenizer=tokenizer)

    def turns(self) -> Any:
        family = FAMILIES[self.name]
        text = family.call.replace("THOUGHT", family.thought[0])
        return [(text, SCHEMAS, [ToolCall(*call) for call in CALLS[: family.num_calls]])]


LEFT_OVER = {
    "qwen3_coder": [
        '<function=add>\n{"a": 1}\n</function>',
        "<function=add>\n<parameter=c>\n2 </parameter> 3\n</parameter>\n</function>",
        "<function=add>\n<parameter=c>\n2 </function> 3\n</parameter>\n</function>",
    ],
    "glm45": [
        '<tool_call>add\n{"a": 1}\n</tool_call>',
        "<tool_call>add\n<arg_key>c</arg_key><arg_value>2</arg_value> 3</arg_value>\n</tool_call>",
    ],
    "pythonic": ["[add(a=1)]\n[add(c='2')]"],
    "mistral": [
        '[TOOL_CALLS][{"name": "add", "arguments": {}}]\n[{"name": "add", "arguments": {}}]',
        '[TOOL_CALLS]add[ARGS]{"a": 1}add[ARGS]{"c": "2"}',
    ],
    "harmony": ['<|channel|>commentary to=functions.add <|constrain|>json{"a":1}'],
}
"""Calls of which a part would be lost: arguments, or another call."""


@pytest.mark.parametrize("name", FORMATS)
def test_a_malformed_call_is_a_call_with_a_problem_that_shows_how_to_write_one(name: str) -> None:
    grammar, family = GRAMMARS[name], FAMILIES[name]
    text = family.call.replace("THOUGHT", "")
    cut_off, without_name = text[: text.rindex("3" if family.num_calls == 2 else "}")], text.replace("add", "", 1)
    for written in (cut_off, without_name, *LEFT_OVER.get(name, ())):
        calls = grammar.parse(written, SCHEMAS, is_thinking=False).calls
        [problem] = [call.problem for call in calls if call.problem] or [""]
        # These have no marks, so that a call without a name, or the whole list, is text.
        assert problem.endswith(f"; write {grammar.example}.") or (name in ("pythonic", "llama3_json") and not calls)


def test_calls_in_reasoning_are_thoughts_and_a_call_ends_reasoning_that_was_not_ended() -> None:
    parse = partial(GRAMMARS["hermes"].parse, tools=(), is_thinking=False)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    thought = parse(f"<think>try {call}</think>no")
    assert (thought.reasoning, thought.content, thought.calls) == (f"try {call}", "no", ())
    open_ended = parse(f"<think>try {call}")
    assert (open_ended.reasoning, len(open_ended.calls)) == ("try", 1)
    assert parse("<think>still").content == ""
    # No reasoning has begun, so the mark in an argument ends none.
    [made] = parse(call.replace("{}", '{"c": "a </think> b"}')).calls
    assert made.arguments == {"c": "a </think> b"}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_arguments_without_quotes_have_a_type_that_their_schema_allows(name: str) -> None:
    written, value = FAMILIES[name].call.replace("THOUGHT", "").replace("2\n3", "VALUE"), SCHEMAS[0]["function"]
    kinds = {kind: {"type": kind} for kind in ("integer", "null", "number", "string")}
    for schema, text, expected in (
        ({"anyOf": [kinds["integer"], kinds["null"]]}, "2020", 2020),
        ({"anyOf": [kinds["integer"], kinds["null"]]}, "null", None),
        ({"type": ["string", "null"]}, "123", "123"),
        ({"type": ["string", "null"]}, "null", None),
        ({"oneOf": [kinds["number"], kinds["string"]]}, "3", 3),
        ({"oneOf": [kinds["number"], kinds["string"]]}, "[3]", "[3]"),
        (kinds["string"], "null", "null"),
        ({}, "1", "1"),
    ):
        tool = {**value, "parameters": {"properties": {"c": schema}}}
        made = GRAMMARS[name].parse(written.replace("VALUE", text), [tool], is_thinking=False).calls[-1]
        assert (made.arguments, made.problem) == ({"c": expected}, "")


def test_a_million_calls_are_not_even_read_and_a_call_nested_too_deeply_has_a_problem() -> None:
    parse = partial(GRAMMARS["hermes"].parse, tools=(), is_thinking=False)
    assert len(parse("<tool_call>{}</tool_call>" * 1_000_000).calls) == 129
    [made] = parse(f"<tool_call>{'[' * 20_000}{']' * 20_000}</tool_call>").calls
    assert made.problem.startswith("the tool call is not valid JSON (maximum recursion depth exceeded")
    for arguments, said in (("[1, 2]", "arguments of f are not an object"), ("[" * 3000, "valid JSON"), ("{", "JSON")):
        assert said in read_call("f", arguments, "id").problem
    assert read_call("f", "", "id") == ToolCall("f", {}, id="id")


def test_a_template_with_tools_in_no_known_format_is_refused_with_the_formats() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + tokenizer.chat_template
    with pytest.raises(
        ConfigError,
        match=r"source\.environment\.tool_format is 'auto', but .* formats: deepseek_v3, glm45, harmony.* or hermes",
    ):
        turns_of("", tokenizer)
    assert Turns(ToolFormatConfig(name="glm45"), REGISTRY, tokenizer).notes == (
        "tool calls: format glm45, since the config names it",
    )
    assert turns_of("", tiny_tokenizer()).notes == (), "a run without tools hears nothing of them"
    for name, template in (("hermes", "chatml"), ("llama3_json", "llama3")):
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
        assert name_of_format(tokenizer, has_tools=True)[0] == name
