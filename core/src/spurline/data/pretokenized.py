"""Read rows that hold token ids already.

In: `input_ids` and one column that says which of them carry loss. Out: a TokenRow. Token ids are checked against the
vocabulary by the encoder, which knows it.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from spurline.data.bad_row import BadRowError, describe
from spurline.data.row_view import RowView

IGNORED_LABEL = -100
"""Label of a token without loss, as everywhere in the Hugging Face libraries."""

_RULES = ("loss_mask", "labels", "prompt_length", "num_actions")


@dataclass(frozen=True)
class TokenRow:
    """Token ids and loss mask (0 or 1), one entry per token. field: the column of the ids, for error messages."""

    input_ids: list[int]
    loss_mask: list[int]
    field: str


def read_token_row(view: RowView) -> TokenRow:
    """The row's tokens and loss mask. With several columns present the first of loss_mask, labels, ... decides."""
    field = view.label("input_ids")
    tokens = _integers(view.require("input_ids"), field)
    if not tokens:
        raise BadRowError(field, "is an empty list: a sample needs at least one token.")
    if min(tokens) < 0:
        raise BadRowError(f"{field}[{tokens.index(min(tokens))}]", f"is {min(tokens)}; token ids are not negative.")
    rule = next((rule for rule in _RULES if view.get(rule) is not None), None)
    if rule is None:
        raise BadRowError(
            field,
            f"comes without a column that says where the loss is. Add one of {', '.join(map(view.label, _RULES))}.",
        )
    label, value = view.label(rule), view.require(rule)
    if rule == "loss_mask":
        mask = _from_mask(value, label, tokens, field)
    elif rule == "labels":
        mask = _from_labels(value, label, tokens, field)
    else:
        mask = _from_count(value, label, len(tokens), from_end=rule == "num_actions")
    return TokenRow(tokens, mask, field)


def _integers(value: Any, field: str) -> list[int]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRowError(field, f"is {describe(value)}, expected a list of whole numbers.")
    for index, item in enumerate(value):
        if type(item) is not int:
            raise BadRowError(f"{field}[{index}]", f"is {describe(item)}, expected a whole number.")
    return list(value)


def _same_length(values: Sized, label: str, tokens: list[int], field: str) -> None:
    if len(values) != len(tokens):
        raise BadRowError(label, f"has {len(values)} entries, but {field} has {len(tokens)}. Give one entry per token.")


def _from_mask(value: Any, label: str, tokens: list[int], field: str) -> list[int]:
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str):
        raise BadRowError(label, f"is {describe(value)}, expected a list of 0 and 1.")
    _same_length(value, label, tokens, field)
    for index, item in enumerate(value):
        if item not in (0, 1):
            raise BadRowError(f"{label}[{index}]", f"is {describe(item)}, expected 0 or 1.")
    return [int(item) for item in value]


def _from_labels(value: Any, label: str, tokens: list[int], field: str) -> list[int]:
    labels = _integers(value, label)
    _same_length(labels, label, tokens, field)
    for index, (wanted, token) in enumerate(zip(labels, tokens, strict=True)):
        if wanted not in (IGNORED_LABEL, token):
            raise BadRowError(
                f"{label}[{index}]",
                f"is {wanted}, but {field}[{index}] is {token}. Labels are not shifted: each is the token at the same "
                f"place, or {IGNORED_LABEL} for no loss.",
            )
    return [int(wanted != IGNORED_LABEL) for wanted in labels]


def _from_count(value: Any, label: str, length: int, *, from_end: bool) -> list[int]:
    if type(value) is not int or not 0 <= value <= length:
        raise BadRowError(label, f"is {describe(value)}, expected a whole number from 0 to {length}, the row's tokens.")
    prompt = length - value if from_end else value
    return [0] * prompt + [1] * (length - prompt)
