"""Guess a `columns` setting for rows that fit no format.

Error messages show the guess, and `spurline init` writes it into the config. It never takes effect by itself. A wrong
guess would train on the wrong text, so only unambiguous names with values of the right type are guessed.
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
"""For each expected column, its other names and a test whether a value has the right type."""

_FORMS: tuple[tuple[str, ...], ...] = (
    ("prompt", "chosen", "rejected"),
    ("messages",),
    ("instruction", "output"),
    # Only for a row with a column `prompt` or `completion`; otherwise the question is a turn of the user.
    ("prompt", "completion"),
    ("text",),
)
"""The required columns of formats, tried in this order."""
_BESIDE: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): ("system",),
    ("instruction", "output"): ("input", "system"),
}
"""Optional columns of these formats. If a row has them, the guess names them too."""


def guessed_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the guessed `columns` setting; empty if no column needs another name, or no format fits."""
    has_own = "prompt" in row or "completion" in row
    for form in _FORMS:
        if form == ("instruction", "output") and has_own:
            continue
        # If a row has several texts, such as a title and a document, it is not clear which one to train on.
        if form == ("text",) and sum(map(_is_text, row.values())) != 1:
            continue
        if all(_found(row, column) for column in form):
            found = _names(row, form)
            return {column: name for column, name in found.items() if name != column}
    for outer, inner in row.items():
        for form in _FORMS if isinstance(inner, Mapping) else ():
            if form != ("text",) and all(_found(inner, column) for column in form):
                return {column: f"{outer}.{name}" for column, name in _names(inner, form).items()}
    return {}


def _names(row: Mapping[str, Any], form: tuple[str, ...]) -> dict[str, str]:
    found = {column: _found(row, column) for column in (*form, *_BESIDE.get(form, ()))}
    return {column: name for column, name in found.items() if name is not None}


def advice(row: Mapping[str, Any], *, needs_answer: bool) -> str:
    """Return advice for a row that fits no format. `needs_answer` is false if answers are generated."""
    if found := guessed_columns(row):
        return _rename(_written(found))
    question = _found(row, "instruction")
    if question is not None and not needs_answer:
        return _rename(_written({"instruction": question}))
    if len(row) == 1 and any(mark in next(iter(row)) for mark in ";\t|"):
        return "Its cells are not separated by commas: write the file with commas between them."
    lists = [name for name, value in row.items() if _is_conversation(value)]
    if not lists:
        return _rename("instruction: NAME, output: NAME")
    roles = {turn.get("role", turn.get("from")) for turn in row[lists[0]]}
    if roles == {None}:
        return f"'{lists[0]}' holds a list of objects: if these are the rows, write each on a line of its own."
    if needs_answer and roles <= {"system", "developer", "user", "human"}:
        return f"'{lists[0]}' holds turns without an answer, which is generated with `source: rollouts`."
    return _rename(f"messages: {lists[0]}")


def _rename(columns: str) -> str:
    return f"Rename columns with `columns: {{{columns}}}`, or set `format`."


def pair_renaming(row: Mapping[str, Any]) -> str:
    """Return the text for inside `columns: {}` for a preference pair; empty if no known names are found."""
    found = guessed_columns(row)
    is_pair = all(side in found or side in row for side in ("chosen", "rejected"))
    return _written(found) if is_pair else ""


def _written(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{column}: {name}" for column, name in columns.items())


def guessed_reference(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the `columns` setting for the reference answer; empty if it has the expected name, or is not found."""
    name = _found(row, "reference")
    return {} if name in (None, "reference") else {"reference": str(name)}


def _found(row: Mapping[str, Any], column: str) -> str | None:
    """Return the name in this row, ignoring case, that is the expected one or a known other one; None if none is."""
    others, fits = _KINDS[column]
    if column in row:
        return column if fits(row[column]) else None
    names = {name.lower(): name for name in row}
    for other in (column, *others):
        name = names.get(other, other)
        if fits(value_at(row, name)):
            return name
    return None
