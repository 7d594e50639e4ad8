"""An `Answer` as JSON and back, for rewards in other processes.

Rows hold what JSON has, and what Parquet and CSV readers add: dates, times, bytes, decimals and numpy's numbers and
arrays. Tuples become lists, and keys text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from spurline.errors import DataError
from spurline_rl.protocols.reward import Answer

_MARK = "\0spurline:"
"""Begins the name of a type that JSON does not have, the only key of an object."""


def pack(answer: Answer) -> str:
    """Return the answer as JSON.

    Raises:
        DataError: If a column cannot be sent; names it.
    """
    try:
        return _json([answer.prompt, answer.response, answer.reference, answer.row, answer.messages])
    except (TypeError, ValueError, RecursionError) as error:
        column = next((name for name, value in answer.row.items() if not _can_be_sent(value)), None)
        what = "The conversation" if column is None else f"The column '{column}'"
        raise DataError(
            f"{what} cannot be sent to the process that calls the reward function: {type(error).__name__}: {error}. "
            "Remove or convert it, or set in_process: true in the reward, which calls the function in the run's own "
            "process."
        ) from error


def unpack(text: str) -> Answer:
    """Return the answer that was packed."""
    return Answer(*json.loads(text, object_hook=_restored))


def _can_be_sent(value: Any) -> bool:
    try:
        _json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _json(value: Any) -> str:
    return json.dumps(value, default=_marked)


def _marked(value: Any) -> Any:
    match value:
        case Mapping():
            return dict(value)
        case datetime() | date() | time():
            # Subclasses, such as pandas' Timestamp, are sent as what they derive from.
            name = type(value).__name__
            return {_MARK + (name if name in _RESTORED else "datetime"): value.isoformat()}
        case timedelta():
            return {f"{_MARK}timedelta": [value.days, value.seconds, value.microseconds]}
        case bytes() | bytearray() | memoryview():
            return {f"{_MARK}bytes": base64.b64encode(value).decode()}
        case Decimal():
            return {f"{_MARK}Decimal": str(value)}
        case np.ndarray() if value.dtype.kind in "biuf":
            return {f"{_MARK}ndarray": [value.dtype.str, value.tolist()]}
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case Sequence():
            return list(value)
    raise TypeError(f"it holds a {type(value).__name__}")


_RESTORED: Mapping[str, Callable[[Any], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "bytes": base64.b64decode,
    "Decimal": Decimal,
    "ndarray": lambda parts: np.array(parts[1], parts[0]),
}


def _restored(found: dict[str, Any]) -> Any:
    name = next(iter(found), "")
    return _RESTORED[name.removeprefix(_MARK)](found[name]) if name.startswith(_MARK) else found
