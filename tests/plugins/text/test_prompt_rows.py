"""Questions of rows: with an answer, without one, and with the reference in a column of its own."""

from __future__ import annotations

from typing import Any

import pytest

from spurline.config.run_config import DataConfig
from spurline.errors import DataError
from spurline_text.configs import HfDatasetConfig
from spurline_text.prompts import ChatQuestion, TextQuestion, prompt_and_reference, read_question
from spurline_text.rows.rows import BadRowError

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def read(row: dict[str, Any], **settings: Any) -> ChatQuestion | TextQuestion:
    return read_question(row, HfDatasetConfig(path="x", **settings))


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"messages": [USER, ANSWER]}, "4"),
        ({"messages": [USER]}, None),
        ({"messages": [USER], "reference": "four"}, "four"),
        ({"messages": [USER, ANSWER], "reference": 4}, "4"),
        ({"conversations": [{"from": "human", "value": "2+2?"}]}, None),
        ({"prompt": [USER]}, None),
        ({"prompt": [USER], "completion": [ANSWER]}, "4"),
        ({"instruction": "2+2?"}, None),
        ({"instruction": "2+2?", "output": "4"}, "4"),
    ],
)
def test_a_conversation_is_asked_up_to_its_answer(row: dict[str, Any], reference: str | None) -> None:
    question = read(row)
    assert isinstance(question, ChatQuestion)
    assert question.messages[: question.answer_at] == [USER]
    assert question.reference == reference


def test_a_conversation_that_goes_on_after_an_answer_is_asked_as_it_stands() -> None:
    question = read({"messages": [USER, ANSWER, {"role": "user", "content": "and 3+3?"}]})
    assert isinstance(question, ChatQuestion)
    assert (question.answer_at, question.reference) == (3, None)


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"prompt": "2+2="}, None),
        ({"prompt": "2+2=", "completion": "4"}, "4"),
        ({"prompt": "2+2=", "completion": ""}, ""),
        ({"prompt": "2+2=", "reference": 4.5}, "4.5"),
    ],
)
def test_text_is_gone_on_from(row: dict[str, Any], reference: str | None) -> None:
    assert read(row) == TextQuestion("2+2=", reference)


def test_columns_of_other_names_are_found() -> None:
    question = read({"question": "2+2=", "solution": "4"}, columns={"prompt": "question", "reference": "solution"})
    assert question == TextQuestion("2+2=", "4")


def test_a_system_column_and_tools_belong_to_the_question() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    question = read({"messages": [USER], "system": "Be brief.", "tools": [tool]})
    assert isinstance(question, ChatQuestion)
    assert question.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert question.tools == [tool]


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(BadRowError, match="token ids"):
        read({"input_ids": [1, 2], "labels": [1, 2]})
    with pytest.raises(BadRowError, match="reference is a list, expected text or a number"):
        read({"prompt": "2+2=", "reference": ["4"]})
    with pytest.raises(DataError, match="fit no format"):
        read({"question": "2+2="})
    with pytest.raises(BadRowError, match=r"text is raw text, which has no question.*columns: \{prompt: text\}"):
        read({"text": "2+2="})


def test_half_a_surrogate_pair_in_a_prompt_or_reference_is_a_bad_row(make_tokenizer: Any) -> None:
    config = HfDatasetConfig(path="x")
    data = DataConfig(train=(config,))
    for row, field in (({"prompt": "a \ud83d"}, "prompt"), ({"prompt": "a", "reference": "\udc00"}, "reference")):
        with pytest.raises(DataError, match=rf"row 7: {field} has half of a surrogate pair"):
            prompt_and_reference(row, config, make_tokenizer(), data, location="row 7")
