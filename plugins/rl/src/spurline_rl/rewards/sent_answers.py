"""An `Answer` as values of JSON and back, for rewards in other processes.

Rows hold what JSON has, which goes as it is, and what Parquet and CSV readers add: dates, times, bytes, decimals and
numpy's numbers and arrays. Tuples become lists, and keys text.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from spurline.errors import DataError
from spurline_rl.protocols.reward import Answer

_MARK = f"\0{secrets.token_hex(8)}:"
"""Begins the name of a type that JSON has not, the only key of an object. It is sent along: no row can know it."""


NOT_JSON = (TypeError, ValueError, RecursionError)
"""What `json` raises for values that it cannot write."""


def pack(answer: Answer) -> Sequence[Any]:
    """The answer's values as they are: they can be written as JSON unless its row holds more than JSON has."""
    return [answer.prompt, answer.response, answer.reference, answer.row, answer.messages]


def pack_as_text(answer: Answer) -> Sequence[Any]:
    """Mark and text, whatever the row holds. Raises DataError naming a column that cannot be sent."""
    try:
        return [_MARK, json.dumps(pack(answer), default=_marked)]
    except NOT_JSON as error:
        column = next((name for name, value in answer.row.items() if not _can_be_sent(value)), None)
        what = "The conversation" if column is None else f"The column '{column}'"
        raise DataError(
            f"{what} cannot be sent to the process that calls the reward function: {type(error).__name__}: {error}. "
            "Remove or convert it, or set in_process: true in the reward, which calls the function in the run's own "
            "process."
        ) from error


def unpack(values: Sequence[Any]) -> Answer:
    """The answer that was packed, in either way."""
    if len(values) == 2:
        mark, text = values
        values = json.loads(text, object_hook=partial(_restored, mark))
    prompt, response, reference, row, messages = values
    return Answer(prompt, response, reference, row, messages)


def _can_be_sent(value: Any) -> bool:
    try:
        json.dumps(value, default=_marked)
    except NOT_JSON:
        return False
    return True


def _marked(value: Any) -> Any:
    match value:
        case Mapping():
            return dict(value)
        case datetime() | date() | time():
            name, told = type(value).__name__, value.isoformat()
            # Subclasses, such as pandas' Timestamp, as what they are one of.
            return {_MARK + (name if name in _RESTORED else "datetime"): told}
        case timedelta():
            return {f"{_MARK}timedelta": [value.days, value.seconds, value.microseconds]}
        case bytes() | bytearray() | memoryview():
            return {f"{_MARK}bytes": base64.b64encode(value).decode()}
        case Decimal():
            return {f"{_MARK}Decimal": str(value)}
        case np.ndarray() if value.dtype.kind in "biufcMm":
            return {f"{_MARK}ndarray": [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case Sequence():
            return list(value)
    raise TypeError(f"it holds a {type(value).__name__}")


_RESTORED: dict[str, Callable[[Any], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "bytes": base64.b64decode,
    "Decimal": Decimal,
    "ndarray": lambda parts: np.frombuffer(base64.b64decode(parts[2]), parts[0]).reshape(parts[1]).copy(),
}


def _restored(mark: str, found: dict[str, Any]) -> Any:
    name = next(iter(found), "")
    return _RESTORED[name.removeprefix(mark)](found[name]) if name.startswith(mark) else found
