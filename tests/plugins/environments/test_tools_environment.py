"""Environment `tools`: conversations with function calls, what can go wrong, and its calculator."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from rl_attempts import core_registry, decode, make_policy, make_task, run, says, tokenizer_with

from spurline.config.assembly import assemble
from spurline.config.run_config import DataConfig, DatasetConfig
from spurline.errors import ConfigError, DataError, PluginError
from spurline_environments import grammars, tools
from spurline_environments.calculator import calculator
from spurline_environments.configs import ToolsConfig
from spurline_environments.grammars import ToolCall
from spurline_environments.tools import Toolbox, Tools
from spurline_rl.protocols.environment import Environment
from spurline_rl.rewards.configs import ExactMatchConfig
from spurline_rl.testing.environment_contract import EnvironmentContract, ScriptedEngine
from spurline_rl.trajectory import Trajectory
from spurline_text.testing.inputs import tiny_tokenizer

ROW = {"messages": [{"role": "user", "content": "What is 6 * 7?"}, {"role": "assistant", "content": "42"}]}


def call(name: str = "calculator", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_environment(tokenizer: Any, on_ignored: Any = "warn", **settings: Any) -> Tools:
    registry = core_registry()
    section: Any = assemble(registry, {"environment": ToolsConfig}).model_fields["environment"].annotation
    config = section.model_validate({"rewards": "exact_match", **settings})
    # Not every template of these tests shows tools; what happens then has a test of its own.
    data = DataConfig(train=(DatasetConfig(name="rows"),), on_ignored=on_ignored)
    return Tools(config, registry, tokenizer, data)


def attempt(
    *replies: str, tokenizer: Any = None, row: Any = ROW, context: int = 4096, longest: int = 200, **settings: Any
) -> Trajectory:
    tokenizer = tokenizer or tiny_tokenizer()
    engine = ScriptedEngine(says(tokenizer, *replies), context=context)
    task = make_task(row)
    return run(make_environment(tokenizer, **settings).run(task, make_policy(engine, task, max_new_tokens=longest)))


def tool_messages(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.info["messages"] if message["role"] == "tool"]


class TestTools(EnvironmentContract):
    def make_environment(self, tokenizer: Any) -> Environment:
        return make_environment(tokenizer, failed_call_reward=-0.5)


def test_the_model_calls_the_calculator_and_answers():
    trajectory = attempt(f"Let me see. {call(expression='6 * 7')}", "42")
    assert trajectory.rewards == {"exact_match": 1.0}
    assert tool_messages(trajectory) == ["42"]
    first, second = trajectory.turns
    seen = [*first.prompt_ids.tolist(), *first.response_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(seen)] == seen
    added = decode(tiny_tokenizer(), second.prompt_ids[len(seen) :])
    assert added == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    info = trajectory.info
    assert (info["ended"], info["calls"], info["failed_calls"]) == ("answer", 1, 0)
    assert (info["response"], info["reference"]) == ("42", "42")
    assert info["prompt"].startswith("<|im_start|>user\nWhat is 6 * 7?")
    json.dumps(trajectory.info)


def search(query: str, year: int | None = None, kinds: list[str] = [], unit="km", box: Toolbox | None = None):  # noqa: B006
    return query


def test_the_template_is_given_the_schemas_of_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with("qwen3")
    tools = {"calculator": "calculator", "plus": "reward_functions:add"}
    prompt = attempt("42", tokenizer=tokenizer, tools=tools).info["prompt"]
    schemas = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"')]
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", "plus"]
    assert schemas[1]["function"] == {
        "name": "plus",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
            "required": ["left"],
        },
    }
    monkeypatch.setattr("reward_functions.add", search)
    [schema] = Toolbox({"search": "reward_functions:add"}, timeout_s=30).schemas()
    assert schema["function"]["parameters"]["properties"] == {
        "query": {"type": "string"},
        "year": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "kinds": {"type": "array", "items": {"type": "string"}},
        "unit": {},
        "box": {},
    }


def test_tools_of_the_row_are_shown_in_place_of_the_configured_ones():
    row = {**ROW, "tools": [{"type": "function", "function": {"name": "of_the_row"}}]}
    prompt = attempt("42", tokenizer=tokenizer_with("qwen3"), row=row).info["prompt"]
    assert "of_the_row" in prompt
    assert "calculator" not in prompt


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (call(expression="1 / 0"), "error: ZeroDivisionError: division by zero"),
        (call(expression="6 *"), "error: ValueError: '6 *' is not a formula"),
        (call("calculater", expression="1"), "error: there is no tool 'calculater'. Tools: calculator, fails, slow."),
        (call(formula="1"), "error: calculator: missing a required argument: 'expression'"),
        (call("fails", reason="no luck"), "error: KeyError: 'no luck'"),
        (call("slow", seconds=30), "error: the tool slow did not return within 0.05 s."),
        ("<tool_call>{'name': 'calculator'}</tool_call>", "error: the tool call is not valid JSON"),
        ("<tool_call>[1]</tool_call>", "error: the tool call has no name; write <tool_call>"),
        ('<tool_call>{"name": "calculator", "arguments": "1"}</tool_call>', "error: the arguments of calculator are"),
        ('<tool_call>{"name": "calculator"', "error: a tool call was not closed; write <tool_call>"),
    ],
)
def test_everything_wrong_with_a_call_goes_back_to_the_model_as_text(written, told):
    tools = {"calculator": "calculator", "fails": "reward_functions:fails", "slow": "reward_functions:sleeps"}
    if "slow" in written:
        written = call("slow", seconds=1)
    trajectory = attempt(written, "42", tools=tools, tool_timeout_s=0.05 if "slow" in written else 30.0)
    [message] = tool_messages(trajectory)
    assert message.startswith(told)
    assert (trajectory.info["ended"], trajectory.info["failed_calls"]) == ("answer", 1)
    assert trajectory.rewards == {"exact_match": 1.0}


def test_calls_beyond_those_of_a_turn_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CALLS", 2)
    calls = call(expression="1") + call(expression="2") + call(expression="3") * 2
    trajectory = attempt(calls, "x", longest=500)
    assert tool_messages(trajectory) == ["1", "2", "error: a turn may have 2 tool calls; the others were not made."]
    assert (trajectory.info["calls"], trajectory.info["failed_calls"]) == (3, 1)


@pytest.mark.parametrize(
    ("value", "told"), [(np.int64(5), "5"), (Decimal("2.50"), "2.50"), ({(1, 2): "a"}, "{(1, 2): 'a'}"), ([1], "[1]")]
)
def test_a_result_that_is_not_json_is_told_as_python_writes_it(value: Any, told: str, monkeypatch) -> None:
    monkeypatch.setattr("reward_functions.echo", lambda text: value)
    box = Toolbox({"echo": "reward_functions:echo"}, timeout_s=30)
    result = run(box.answer(ToolCall("echo", {"text": ""})))
    assert result == (told, False)


def test_results_of_a_turn_are_cut_where_they_are_too_long_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MAX_RESULT_CHARACTERS", 12)
    calls = call("echo", text="1" * 8) + call("echo", text="2", times=10**6) + call("echo", text="3" * 8)
    answer = "(cut: 1,000,000 characters, more than a turn's results may have)"
    trajectory = attempt(calls, "x", longest=500, tools={"echo": "reward_functions:echo"})
    assert tool_messages(trajectory) == ["1" * 8, f"2222\n{answer}", f"\n{answer.replace('1,000,000', '8')}"]


@pytest.mark.parametrize("written", ['"\\ud83d"', "[" * 900 + "]" * 900, "9" * 4000])
def test_what_cannot_be_written_down_comes_back_as_what_can(written: str) -> None:
    toolbox = Toolbox({"echo": "reward_functions:echo"}, timeout_s=30)
    result = run(toolbox.answer(ToolCall("echo", {"text": json.loads(written)})))
    assert result[0].encode()


def test_turns_with_failed_calls_get_the_reward_for_that():
    trajectory = attempt(call("nothing"), call(expression="6*7"), "42", failed_call_reward=-0.25)
    rewards = [turn.rewards for turn in trajectory.turns]
    assert [reward[-1] for reward in rewards if reward is not None] == [-0.25, 0.0, 0.0]
    assert all(turn.rewards is None for turn in attempt("42", failed_call_reward=-0.25).turns)
    # The last turn that the model may have has a failed call, too, if nobody can read it.
    last = attempt(call(expression="6*7"), "<tool_call>{}</tool_call>", failed_call_reward=-0.25, max_turns=2)
    assert [turn.rewards[-1] for turn in last.turns if turn.rewards is not None] == [0.0, -0.25]
    assert (last.info["ended"], last.info["metrics"]["tools/failed"]) == ("max_turns", 0.5)


def test_the_conversation_ends_after_max_turns_without_another_call():
    trajectory = attempt(*[call(expression="1 + 1")] * 3, max_turns=3)
    assert len(trajectory.turns) == 3
    assert trajectory.info["ended"] == "max_turns"
    assert len(tool_messages(trajectory)) == 2
    assert trajectory.rewards == {"exact_match": 0.0}


def test_a_turn_cut_off_ends_the_conversation():
    trajectory = attempt(call(expression="1 + 1") + "<tool_call>{" + "x" * 200)
    assert trajectory.info["ended"] == "length"
    assert len(trajectory.turns) == 1
    # What was cut off is no malformed call.
    assert trajectory.info["metrics"] == {"tools/calls": 0, "turns/forked": 0}


def test_a_conversation_that_outgrows_the_context_ends_and_is_scored():
    trajectory = attempt(call(expression="6 * 7"), "42", context=125)
    assert trajectory.info["ended"] == "context"
    assert len(trajectory.turns) == 1
    assert trajectory.rewards == {"exact_match": 0.0}


@pytest.mark.parametrize(("history", "forks"), [("exact", 1), ("retokenize", 0)])
def test_a_template_that_drops_thinking_forks_the_conversation(history: str, forks: int):
    replies = [f"<think>\nuse it\n</think>\n\n{call(expression='6 * 7')}", "42"]
    trajectory = attempt(*replies, tokenizer=tokenizer_with("strips_thinking"), history=history)
    assert trajectory.rewards == {"exact_match": 1.0}
    assert trajectory.info["metrics"]["turns/forked"] == forks
    assert "use it" not in decode(tiny_tokenizer(), trajectory.turns[1].prompt_ids)
    assert "use it" in decode(tiny_tokenizer(), trajectory.turns[0].response_ids)


def test_calls_are_counted_and_those_that_nobody_can_read_apart():
    tokenizer = tokenizer_with("qwen3")
    calls = call(expression="1") * 2 + call("x") + "<tool_call>{"
    trajectory = attempt(calls, "<think>so</think>42", tokenizer=tokenizer, longest=500)
    counts = {"tools/calls": 4, "tools/unparsed": 0.25, "tools/failed": 0.5, "turns/forked": 0}
    assert trajectory.info["metrics"] == counts
    assert (trajectory.info["response"], trajectory.rewards) == ("42", {"exact_match": 1.0})
    # The model sees its own text again, and what is wrong with it.
    assert "<tool_call>{<|im_end|>" in decode(tokenizer, trajectory.turns[1].prompt_ids)
    assert "error: a tool call was not closed" in decode(tokenizer, trajectory.turns[1].prompt_ids)
    assert attempt("42").info["metrics"] == {"tools/calls": 0, "turns/forked": 0}


def test_a_demonstration_with_tool_turns_is_begun_at_its_question():
    question, answer = ROW["messages"]
    shown = [{"role": "assistant", "content": call(expression="6 * 7")}, {"role": "tool", "content": "42"}]
    trajectory = attempt("42", row={"messages": [question, *shown, answer]})
    assert [message["role"] for message in trajectory.info["messages"]] == ["user", "assistant"]
    assert trajectory.rewards == {"exact_match": 1.0}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "6 * 7 =", "completion": "42"}, "this row is plain text.* chat"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "input_ids holds token ids.* chat"),
        ({"messages": [{"role": "usr", "content": "x"}]}, r"messages\[0\]\.role is text \('usr'\), not a known role"),
        ({"question": "x"}, r"the columns \(question\) fit no format"),
    ],
)
def test_rows_that_are_no_conversation_are_refused(row, complaint):
    with pytest.raises(DataError, match=complaint):
        attempt("42", row=row)


def test_tools_may_be_async_or_take_any_argument_name_and_return_any_json():
    box = Toolbox({"plus": "reward_functions:add"}, timeout_s=30)
    result = run(box.answer(ToolCall("plus", {"left": 2})))
    assert result == ("3", False)
    keyword = Toolbox({"named": "reward_functions:named_like_our_own"}, timeout_s=30)
    result = run(keyword.answer(ToolCall("named", {"what": 1, "function": 2, "timeout_s": 3})))
    assert result == ("[1, 2, 3]", False)


def test_a_tool_that_does_not_exist_is_refused_at_the_start():
    with pytest.raises(PluginError, match="The tool 'plus' names 'reward_functions:plus', but reward_functions has no"):
        make_environment(tiny_tokenizer(), tools={"plus": "reward_functions:plus"})
    config = ToolsConfig(rewards={"right": ExactMatchConfig()}, tools={"plus": "calculater"})
    run_config: Any = None
    [problem] = config.problems(run_config)
    assert (problem.key, "Did you mean 'calculator'?" in problem.message) == ("tools.plus", True)


def test_a_template_that_never_mentions_the_tools_is_refused_before_anything_is_generated():
    with pytest.raises(ConfigError, match=r"tools are not shown by the template .* Set model.chat_template"):
        make_environment(tokenizer_with("chatml"), on_ignored="error")
    shown = make_environment(tokenizer_with("qwen3"), on_ignored="error")
    task = make_task({**ROW, "messages": [{"role": "system", "content": "Be brief."}, *ROW["messages"]]})
    engine = ScriptedEngine(says(tokenizer_with("qwen3"), "42"), context=4096)
    assert run(shown.run(task, make_policy(engine, task, max_new_tokens=9))).rewards


def test_a_message_that_the_template_leaves_out_is_found_when_prompts_are_looked_at():
    tokenizer = tokenizer_with("qwen3")
    without_system = "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
    tokenizer.chat_template = without_system + tokenizer.chat_template
    row = {"messages": [{"role": "system", "content": "Answer in French."}, *ROW["messages"]]}
    with pytest.raises(DataError, match=r"messages\[0\] \(role system\): the chat template"):
        make_environment(tokenizer, on_ignored="error").first_prompt(make_task(row))
    assert make_environment(tokenizer, on_ignored="error").first_prompt(make_task(ROW))


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("6*7", "42"),
        ("(1 + 2) * -3", "-9"),
        ("7 // 2 + 7 % 2", "4"),
        ("1/3", "0.333333333333"),
        (" 2 ** 10 ", "1024"),
        ("1" + "+1" * 499, "500"),
    ],
)
def test_the_calculator_computes(formula, value):
    assert calculator(formula) == value


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os')",
        "x",
        "9 ** 9 ** 9",
        "True + 1",
        "1e308 * 10",
        "(-1) ** 0.5",
        "1; 2",
        "'a' * 9",
        "[1][0]",
        "",
        "1 + " * 400 + "1",
        "10**1000 * 10**1000",
        "((lambda: 1)())",
        "-" * 999 + "1",
        "(" * 400 + "1" + ")" * 400,
    ],
)
def test_the_calculator_refuses_everything_else(formula):
    with pytest.raises(ValueError, match=r"."):
        calculator(formula)


@pytest.mark.parametrize("limit", [400, 1_000, 10_000])
def test_a_formula_is_too_deep_whatever_the_interpreter_allows(limit):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with pytest.raises(ValueError, match="nested too deeply"):
            calculator("-" * 600 + "1")
    finally:
        sys.setrecursionlimit(before)
