"""The error for one malformed row, before it is known where the row is.

Raised by the readers of rows; the encoder adds the location, or counts the row when `on_bad_row: skip`.
"""

from __future__ import annotations

from typing import Any

from spurline.errors import DataError


class BadRowError(DataError):
    """A row that cannot be read.

    field: path in the row, such as `messages[2].role`. problem: what is wrong and the fix.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field} {problem}".strip())

    def at(self, location: str) -> DataError:
        """The same error with the place in front: `train.jsonl:12: messages[2].role is ...`."""
        return DataError(f"{location}: {self}")


def describe(value: Any) -> str:
    """What a value is, for `... is a number (42), expected text`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"a boolean ({str(value).lower()})"
    if isinstance(value, (int, float)):
        return f"a number ({value})"
    if isinstance(value, str):
        return f"text ({value[:40]!r}{'...' if len(value) > 40 else ''})"
    if isinstance(value, (list, tuple)):
        return "a list" if len(value) else "an empty list"
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, value)) or 'no fields'}"
    return f"a {type(value).__name__}"
