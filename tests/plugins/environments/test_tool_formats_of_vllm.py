"""Our tool formats against the parsers of vLLM, which also serve formats that we do not know."""

from __future__ import annotations

from functools import partial
from itertools import combinations_with_replacement

import pytest
from tool_families import FAMILIES, SCHEMAS, tokenizer_of

from spurline.errors import ConfigError
from spurline_environments.configs import VllmFormatConfig
from spurline_environments.grammars import GRAMMARS, ParsedTurn
from spurline_environments.vllm_format import VllmFormat

# vLLM takes 40 seconds of CPU to import.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PARSERS = {
    "hermes": ("hermes", "qwen3"),
    "qwen3_coder": ("qwen3_coder", "qwen3"),
    "glm45": ("glm45", "glm45"),
    "deepseek_v3": ("deepseek_v3", "deepseek_r1"),
    "mistral": ("mistral", "mistral"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "llama3_json": ("llama3_json", None),
    "pythonic": ("pythonic", None),
}
"""vLLM's parsers of calls and of reasoning. Its parser of gpt-oss needs a vocabulary that is not at hand."""
MARKS = "<think> </think> <tool_call> </tool_call> [CALL_ID] <|tool_calls_section_begin|> <|tool_calls_section_end|>"


def parts(turn: ParsedTurn) -> tuple[object, ...]:
    """What a turn says: vLLM keeps some white space around it, and some empty reasoning."""
    calls = [(call.name, call.arguments) for call in turn.calls if not call.problem and call.name]
    return (turn.reasoning or "").strip(), turn.content.strip(), calls


@pytest.mark.parametrize("name", PARSERS)
def test_a_turn_is_read_as_by_vllm(name: str) -> None:
    pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
    family, grammar, tokenizer = FAMILIES[name], GRAMMARS[name], tokenizer_of(name)
    tokenizer.add_tokens([*MARKS.split(), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"], special_tokens=True)  # noqa: RUF001
    parser, reasoning = PARSERS[name]
    with_reasoning = VllmFormat(VllmFormatConfig(parser=parser, reasoning=reasoning), tokenizer)
    # Most of vLLM's parsers of reasoning take text without any mark for reasoning, as if the prompt had begun it.
    without = VllmFormat(VllmFormatConfig(parser=parser), tokenizer)
    is_begun = name == "qwen3_coder"
    for text in (family.call, family.answer):
        written = text.replace("THOUGHT", family.thought[0])
        assert parts(grammar.parse(written, SCHEMAS, is_thinking=is_begun)) == parts(
            with_reasoning.parse(written, SCHEMAS)
        )
    bare = family.call.replace("THOUGHT", "")
    others = [f"{bare}\nand so on"] if name != "pythonic" else []
    # vLLM's parser of GLM makes no call of a tool that it does not know.
    others += [bare.replace("add", "nice.tool-1")] if name != "glm45" else []
    for plain in (bare, "4 < 5 {é}", *others):
        assert parts(grammar.parse(plain, SCHEMAS, is_thinking=False)) == parts(without.parse(plain, SCHEMAS))
    # What is malformed has a problem. vLLM returns it as content, leaves it out, or makes a call without arguments.
    for broken in (bare[: bare.rindex("3" if family.num_calls == 2 else "}")], bare.replace("add", "", 1)):
        ours, theirs = (
            parse.calls for parse in (grammar.parse(broken, SCHEMAS, is_thinking=False), without.parse(broken, SCHEMAS))
        )
        assert any(call.problem for call in ours) or not theirs
        for call in ours:
            assert call.problem or not theirs or (call.name, call.arguments) in [(c.name, c.arguments) for c in theirs]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_arguments_have_the_types_that_vllm_gives_them(name: str) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    theirs = VllmFormat(VllmFormatConfig(parser=name), tokenizer_of(name))
    written = FAMILIES[name].call.replace("THOUGHT", "").replace("2\n3", "VALUE")
    kinds = ("integer", "number", "string", "null", "object")
    # With text and an object, vLLM takes any JSON.
    for union in [{*pair} for pair in combinations_with_replacement(kinds, 2) if pair != ("string", "object")]:
        for schema in ({"type": [*union]}, {"anyOf": [{"type": kind} for kind in union]}):
            tool = {**SCHEMAS[0]["function"], "parameters": {"type": "object", "properties": {"c": schema}}}
            for text in ("2020", "null", "x", "1.5", "-3", '{"a": 1}', "[1]", "true", '"q"'):
                turns = [
                    parse(written.replace("VALUE", text), [{"type": "function", "function": tool}])
                    for parse in (partial(GRAMMARS[name].parse, is_thinking=False), theirs.parse)
                ]
                mine, other = (turn.calls[-1].arguments["c"] for turn in turns)
                assert (mine, type(mine)) == (other, type(other)), f"{schema} {text}"


def test_calls_that_vllm_reads_without_an_object_of_arguments_have_a_problem() -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    hermes = VllmFormat(VllmFormatConfig(parser="hermes"), tokenizer_of("hermes"))
    [made] = hermes.parse('<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>', SCHEMAS).calls
    assert made.problem == "the arguments of f are not an object."


def test_a_parser_that_vllm_does_not_have_is_an_error_with_those_it_has() -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    with pytest.raises(ConfigError, match=r"tool_format\.parser is 'herms', which vLLM does not have. It has .*hermes"):
        VllmFormat(VllmFormatConfig(parser="herms"), tokenizer_of("hermes"))
