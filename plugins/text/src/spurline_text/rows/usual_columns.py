"""Guess what a row's columns mean where they have other names than Spurline reads.

In: a row that fits no format. Out: the `columns` setting with which it would fit one, or nothing; errors show it, and
`spurline init` writes it. Only names that say one thing are known, and only values of the right kind count: a wrong
guess would train on something else. Nothing is read from a column because of its name here.
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
"""Expected column: what others call it, and whether a value can be one."""

_FORMS: tuple[tuple[str, ...], ...] = (
    ("prompt", "chosen", "rejected"),
    ("messages",),
    ("instruction", "output"),
    # Of a row that has one of the two: its prompt is plain text to go on from, and that of `instruction` a user's turn.
    ("prompt", "completion"),
    ("text",),
)
"""Columns that make a row one of some format, tried in this order."""
_BESIDE: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): ("system",),
    ("instruction", "output"): ("input", "system"),
}
"""Further columns that a row of such a format may have, and that must then be named too."""


def guessed_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """The `columns` setting; empty where nothing is to be renamed, or nothing fits."""
    has_own = "prompt" in row or "completion" in row
    for form in _FORMS:
        if form == ("instruction", "output") and has_own:
            continue
        # A document beside a title and a summary is not what is to be learned.
        if form == ("text",) and sum(map(_is_text, row.values())) != 1:
            continue
        if all(_found(row, column) for column in form):
            found = {column: _found(row, column) for column in (*form, *_BESIDE.get(form, ()))}
            return {column: name for column, name in found.items() if name is not None and name != column}
    for outer, value in row.items():
        inner: Any = value
        for form in _FORMS if isinstance(value, Mapping) else ():
            if form != ("text",) and all(_found(inner, column) for column in form):
                found = {column: _found(inner, column) for column in (*form, *_BESIDE.get(form, ()))}
                return {column: f"{outer}.{name}" for column, name in found.items() if name is not None}
    return {}


def advice(row: Mapping[str, Any], *, needs_answer: bool) -> str:
    """Say what to do with a row that fits no format: a readable `columns` setting, or what is wrong with the file.

    needs_answer: False where answers are generated.
    """
    if found := guessed_columns(row):
        return _rename(_written(found))
    question = _found(row, "instruction")
    if question is not None and not needs_answer:
        return _rename(_written({"instruction": question}))
    if len(row) == 1 and any(mark in next(iter(row)) for mark in ";\t|"):
        return "Its cells are not separated by commas: write the file with commas between them."
    rows = next((name for name, value in row.items() if _is_conversation(value) and not _are_messages(value)), None)
    if rows is not None:
        return f"'{rows}' holds a list of objects: if these are the rows, write each on a line of its own."
    texts = [name for name, value in row.items() if _is_text(value)]
    others = [value for value in row.values() if isinstance(value, (list, tuple, Mapping))]
    # A lone column of text is raw text.
    if len(texts) == 1 and not others:
        return _rename(f"text: {texts[0]}")
    messages = next((name for name, value in row.items() if _are_messages(value)), None)
    if messages is None:
        return _rename("instruction: NAME, output: NAME")
    roles = {turn.get("role", turn.get("from")) for turn in row[messages]}
    if needs_answer and roles <= {"system", "developer", "user", "human"}:
        return f"'{messages}' holds turns without an answer, which is generated with `source: rollouts`."
    return _rename(f"messages: {messages}")


def _rename(columns: str) -> str:
    return f"Rename columns with `columns: {{{columns}}}`, or set `format`."


def _are_messages(value: Any) -> bool:
    return _is_conversation(value) and all("role" in turn or "from" in turn for turn in value)


def pair_renaming(row: Mapping[str, Any]) -> str:
    """The inside of a `columns` setting for a preference pair; empty where there is none under usual names."""
    found = guessed_columns(row)
    is_pair = all(side in found or side in row for side in ("chosen", "rejected"))
    return _written(found) if is_pair else ""


def _written(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{column}: {name}" for column, name in columns.items())


def guessed_reference(row: Mapping[str, Any]) -> dict[str, str]:
    """The `columns` setting for what answers to a prompt are compared with; empty where it has its name, or none."""
    name = _found(row, "reference")
    return {} if name in (None, "reference") else {"reference": str(name)}


def _found(row: Mapping[str, Any], column: str) -> str | None:
    """The name of what is this column: its own, or another of those that are known, in any case."""
    others, fits = _KINDS[column]
    if column in row:
        return column if fits(row[column]) else None
    names = {name.lower(): name for name in row}
    for other in (column, *others):
        name = names.get(other, other)
        if fits(value_at(row, name)):
            return name
    return None
