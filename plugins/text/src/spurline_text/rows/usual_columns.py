"""Guess a `columns` setting for rows that fit no format.

Error messages show the guess, and `spurline init` writes it into the config. Nothing else uses it. With a wrong guess,
the model would train on the wrong text. So only unambiguous names with values of the right type are guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spurline_text.rows.rows import value_at

_QUESTIONS = ("question", "query", "problem", "request", "user", "user_message")
_ANSWERS = ("answer", "response", "completion", "output", "solution", "reply", "assistant", "assistant_message")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


def _is_answer(value: Any) -> bool:
    return _is_text(value) or _is_conversation(value)


def _is_comparable(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


_KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "messages": (("conversation", "dialogue", "dialog", "chat", "turns"), _is_conversation),
    "instruction": (_QUESTIONS, _is_text),
    "output": (_ANSWERS, _is_text),
    "input": (("context", "passage", "background"), _is_text),
    "system": (("system_prompt", "system_message"), _is_text),
    "prompt": ((*_QUESTIONS, "input"), _is_text),
    "completion": (_ANSWERS, _is_text),
    "chosen": (("preferred", "accepted", "better", "chosen_response"), _is_answer),
    "rejected": (("dispreferred", "worse", "rejected_response"), _is_answer),
    "text": (("content", "document", "body"), _is_text),
    "reference": (("ground_truth", "reward_model.ground_truth", "target", *_ANSWERS), _is_comparable),
}
"""For each expected column, its other usual names and a function that checks the type of a value."""

_FORMS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("prompt", "chosen", "rejected"), ()),
    (("messages",), ("system",)),
    (("instruction", "output"), ("input", "system")),
    # Rows with a column `prompt` or `completion` skip the entry above. In other rows, a question becomes a user turn.
    (("prompt", "completion"), ()),
    (("text",), ()),
)
"""The required and optional columns of each format, in the order in which they are tried."""


def guessed_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the guessed `columns` setting. It is empty if no column needs another name, or if no format fits."""
    has_own = "prompt" in row or "completion" in row
    for required, optional in _FORMS:
        if required == ("instruction", "output") and has_own:
            continue
        # If a row has several texts, such as a title and a document, it is not clear which text to train on.
        if required == ("text",) and sum(map(_is_text, row.values())) != 1:
            continue
        if all(_found(row, column) for column in required):
            names = {column: _found(row, column) for column in (*required, *optional)}
            return {column: name for column, name in names.items() if name and name != column}
    return {}


def advice(row: Mapping[str, Any], *, needs_answer: bool) -> str:
    """Return a fix for a row that fits no format. `needs_answer` is false if answers are generated."""
    found = guessed_columns(row)
    if not found and not needs_answer and (question := _found(row, "instruction")):
        found = {"instruction": question}
    columns = ", ".join(f"{column}: {name}" for column, name in found.items())
    return f"Rename columns with `columns: {{{columns or 'instruction: NAME, output: NAME'}}}`, or set `format`."


def guessed_reference(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the `columns` setting for the reference. It is empty if no column fits, or if `reference` itself fits."""
    name = _found(row, "reference")
    return {} if name in (None, "reference") else {"reference": str(name)}


def _found(row: Mapping[str, Any], column: str) -> str | None:
    """Return the name that an expected column has in this row, ignoring case, or None if the row lacks the column."""
    others, fits = _KINDS[column]
    if column in row:
        return column if fits(row[column]) else None
    names = {name.lower(): name for name in row}
    for other in (column, *others):
        name = names.get(other, other)
        if fits(value_at(row, name)):
            return name
    return None
