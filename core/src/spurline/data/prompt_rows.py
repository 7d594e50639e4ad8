"""The question of a row that a model is to answer, and the reference answer where the row has one.

Place on the way: Dataset row -> question -> prompt tokens. The formats are those of training rows; here the answer may
be missing, and a column `reference` may hold what the answer is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spurline.config.run_config import DatasetConfig
from spurline.data.bad_row import BadRowError, describe
from spurline.data.formats import ANSWER_COLUMNS, TextPair, detect_format, read_row
from spurline.data.messages import Message, assistant_turns
from spurline.data.pretokenized import TokenRow
from spurline.data.row_view import RowView


@dataclass(frozen=True)
class ChatQuestion:
    """messages: the whole conversation of the row. answer_at: the message that is the answer, or their number when the
    row ends with the question. reference: the expected answer, or None. tools: schemas that the row brings."""

    messages: list[Message]
    answer_at: int
    reference: str | None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TextQuestion:
    """Plain text to go on from. reference: the expected answer, or None."""

    text: str
    reference: str | None


def read_question(
    row: Mapping[str, Any], config: DatasetConfig, *, has_chat_template: bool
) -> ChatQuestion | TextQuestion:
    """The question of a row in any format but `pretokenized`.

    A conversation that ends with an assistant turn is asked up to there; any other is the question as it stands.
    Raises BadRowError naming the field, and DataError when the columns fit no format.
    """
    name = detect_format(config, row, needs_answer=False)
    item = read_row(row, config, name, has_chat_template=has_chat_template, needs_answer=False)
    view = RowView(row, config.columns)
    reference = _reference(view)
    if isinstance(item, TokenRow):
        raise BadRowError(
            item.field,
            "holds token ids; answers cannot be generated and scored as text for pretokenized rows. Use chat, alpaca "
            "or prompt_completion rows.",
        )
    if isinstance(item, TextPair):
        has_answer = any(view.get(column) is not None for column in ANSWER_COLUMNS)
        return TextQuestion(item.prompt, item.completion if reference is None and has_answer else reference)
    messages = item.messages
    if messages[-1]["role"] != "assistant":
        return ChatQuestion(messages, len(messages), reference, item.tools)
    answer_at = assistant_turns(messages)[-1]
    answer = str(messages[answer_at].get("content", ""))
    return ChatQuestion(messages, answer_at, answer if reference is None else reference, item.tools)


def _reference(view: RowView) -> str | None:
    """The `reference` column as text; numbers are written out."""
    value = view.get("reference")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise BadRowError(view.label("reference"), f"is {describe(value)}, expected text or a number.")
