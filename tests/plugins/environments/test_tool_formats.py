"""Tool formats: for each family, conversations with its own kind of template go round, and its calls are read."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from rl_attempts import core_registry, decode, encode, extends, make_policy, run, says
from tool_families import CALLS, FAMILIES, SCHEMAS, tokenizer_of
from transformers import PreTrainedTokenizerBase

from spurline.errors import ConfigError
from spurline_environments.configs import AutoFormatConfig, ToolFormatConfig
from spurline_environments.grammars import GRAMMARS, ToolCall
from spurline_environments.plugin import FORMATS
from spurline_environments.testing import ToolFormatContract
from spurline_environments.tool_formats import Turns, name_of_format, result_message
from spurline_rl.chat_front import ChatFront
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_text.testing.inputs import tiny_tokenizer

REGISTRY = core_registry()


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


@pytest.mark.parametrize("name", FORMATS)
def test_a_malformed_call_is_a_call_with_a_problem_that_shows_how_to_write_one(name: str) -> None:
    grammar, family = GRAMMARS[name], FAMILIES[name]
    text = family.call.replace("THOUGHT", "")
    # One is cut off, and one has no name.
    for written in (text[: text.rindex("3" if family.num_calls == 2 else "}")], text.replace("add", "", 1)):
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


def test_a_million_calls_are_not_even_read_and_a_call_nested_too_deeply_has_a_problem() -> None:
    parse = partial(GRAMMARS["hermes"].parse, tools=(), is_thinking=False)
    assert len(parse("<tool_call>{}</tool_call>" * 1_000_000).calls) == 129
    [made] = parse(f"<tool_call>{'[' * 20_000}{']' * 20_000}</tool_call>").calls
    assert made.problem.startswith("the tool call is not valid JSON (maximum recursion depth exceeded")


def test_a_template_with_tools_in_no_known_format_is_refused_with_the_formats() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + tokenizer.chat_template
    with pytest.raises(
        ConfigError, match=r"source\.environment\.tool_format is 'auto', but .* formats: deepseek_v3, glm45, harmony"
    ):
        turns_of("", tokenizer)
    assert Turns(ToolFormatConfig(name="glm45"), REGISTRY, tokenizer).notes == (
        "tool calls: format glm45, since the config names it",
    )
    assert name_of_format(tiny_tokenizer())[0] == "hermes"
