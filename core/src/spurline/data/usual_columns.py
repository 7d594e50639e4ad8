"""What columns are usually called in data of others, for messages that say how to name them.

Only suggestions are made of it: nothing is read from a column because of its name here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

_QUESTIONS = ("prompt", "question", "instruction", "query", "problem", "user", "human", "request", "input")
_ANSWERS = ("completion", "answer", "output", "response", "solution", "assistant", "reply", "target")
_CHOSEN = ("chosen", "accepted", "preferred", "better", "good", "winner", "positive", "chosen_response")
_REJECTED = ("rejected", "dispreferred", "worse", "bad", "loser", "negative", "rejected_response")


def renaming(row: Mapping[str, Any], *, needs_answer: bool) -> str:
    """The inside of a `columns` setting that could be meant for a row that fits no format.

    needs_answer: False where answers are generated.
    """
    conversations = [name for name, value in row.items() if _is_conversation(value)]
    if conversations:
        return f"messages: {conversations[0]}"
    texts = [name for name, value in row.items() if isinstance(value, str)]
    question, answer = _one_of(_QUESTIONS, texts), _one_of(_ANSWERS, texts)
    if question is not None and answer is not None:
        # An `input` is a second part of an instruction, so it would be read twice under that name.
        plain = question.casefold() in ("prompt", "input") or answer.casefold() == "completion"
        names = ("prompt", "completion") if plain else ("instruction", "output")
        return _written(zip(names, (question, answer), strict=True))
    if question is not None and not needs_answer:
        return _written([("instruction", question)])
    lists = [name for name, value in row.items() if isinstance(value, (list, tuple))]
    if len(texts) == 1 and not lists:
        return f"text: {texts[0]}"
    return f"messages: {next(iter([*lists, *row]), 'NAME')}"


def pair_renaming(row: Mapping[str, Any], present: Iterable[str]) -> str:
    """The same for a preference pair; empty where a missing answer is under no usual name.

    present: the expected columns that the row has.
    """
    usual = {"chosen": _CHOSEN, "rejected": _REJECTED, "prompt": _QUESTIONS}
    found = {name: _one_of(names, row) for name, names in usual.items() if name not in set(present)}
    if any(found.get(side, "") is None for side in ("chosen", "rejected")):
        return ""
    return _written((name, column) for name, column in found.items() if column is not None)


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return isinstance(cast("list[Any] | tuple[Any, ...]", value)[0], Mapping)


def _one_of(usual: Iterable[str], columns: Iterable[str]) -> str | None:
    """The column with the first of these names, whatever its case."""
    folded = {column.casefold(): column for column in columns}
    return next((folded[name] for name in usual if name in folded), None)


def _written(names: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {column}" for name, column in names if name != column)
