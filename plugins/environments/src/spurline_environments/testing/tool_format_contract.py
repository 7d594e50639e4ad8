"""Check that a tool format keeps its contract."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerBase

from spurline_environments.grammars import ParsedTurn, Schemas, ToolCall
from spurline_environments.tool_formats import ToolFormat
from spurline_text.testing.inputs import tiny_tokenizer


class ToolFormatContract:
    """A test suite: define `make_format(tokenizer)` and `turns()` in a subclass."""

    def make_format(self, tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
        raise NotImplementedError("subclass ToolFormatContract with make_format(self, tokenizer)")

    def turns(self) -> Sequence[tuple[str, Schemas, Sequence[ToolCall]]]:
        """Return texts of turns, the schemas of their tools, and their calls, whose ids are not compared."""
        raise NotImplementedError("subclass ToolFormatContract with turns(self)")

    @pytest.fixture
    def format(self) -> ToolFormat:
        return self.make_format(tiny_tokenizer())

    def test_the_calls_of_a_turn_are_read_alike_each_time(self, format: ToolFormat) -> None:
        for text, tools, calls in self.turns():
            first, second = format.parse(text, tools), format.parse(text, tools)
            assert first == second
            assert [(call.name, call.arguments, call.problem) for call in first.calls] == [
                (call.name, call.arguments, "") for call in calls
            ]

    def test_text_without_marks_is_the_content_unchanged(self, format: ToolFormat) -> None:
        for text in ("", " 42 \n", "é 四 🙂", "a < b > c & {x}", "[1, 2]", '{"answer": 42}'):
            assert format.parse(text) == ParsedTurn(text, None, ())

    def test_no_part_of_a_turn_is_an_error(self, format: ToolFormat) -> None:
        for text, tools, _ in self.turns():
            for stop in range(len(text)):
                for part in (text[:stop], text[stop:]):
                    turn = format.parse(part, tools)
                    assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in turn.calls)
