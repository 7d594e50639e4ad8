"""Read one row by the column names that Spurline expects, and describe a malformed row.

In: a row and the `columns` setting. Out: values by expected name. Errors use the name that the column has in the file.
`BadRowError` does not contain the location of the row. The encoder adds the location, or leaves the row out and counts
it if the config has `on_bad_row: skip`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, cast

from spurline.errors import DataError, listing, nearest, suggestion


class BadRowError(DataError):
    """A row that cannot be read. `field` is the path in the row, `problem` describes the mistake and its fix."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field} {problem}".strip())

    def at(self, location: str) -> DataError:
        """Return an error that begins with the location: `train.jsonl:12: messages[2].role is ...`."""
        return DataError(f"{location}: {self}")


def explain_bad_row(location: str, error: DataError) -> DataError:
    """Return the error with the location of the row and with a fix. Each is added only if the text lacks it."""
    text = str(error)
    place = "" if location in text else f"{location}: "
    fix = "" if "on_bad_row" in text else " Correct the row, or leave such rows out with `on_bad_row: skip`."
    return DataError(f"{place}{text}{fix}")


def describe(value: Any) -> str:
    """Describe a value for messages such as `... is a number (42), expected text`."""
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
        return f"an object with {listing(map(str, value)) if value else 'no fields'}"
    return f"a {type(value).__name__}"


def require_text(text: str, row: Mapping[str, Any]) -> None:
    """Raise BadRowError if `text`, made from the row, is not valid Unicode. The error names the column.

    In JSON, `\\ud83d` without its second half gives such text. No tokenizer accepts it, and no file can store it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadRowError(
            next((name for name, value in row.items() if half in repr(value)), "text"),
            f"has half of a surrogate pair ({half}), which is not Unicode text: a character was cut in two. Correct "
            "the row, leave it out, or set `on_bad_row: skip`.",
        ) from error


EXPECTED_COLUMNS = (
    *("messages", "conversations", "system", "tools", "text", "instruction", "input", "output"),
    *("prompt", "completion", "chosen", "rejected", "label", "reference", "input_ids", "loss_mask", "labels"),
)
"""All column names that formats read."""


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or None. See `RowView` for names with dots."""
    holder, inner = _holder(row, name)
    return holder.get(inner)


def _holder(row: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    """Return the innermost object that a name with dots leads to, and the column's name in this object."""
    while name not in row and "." in name:
        first, _, rest = name.partition(".")
        inner = row.get(first)
        if not isinstance(inner, Mapping):
            break
        row, name = cast("Mapping[str, Any]", inner), rest
    return row, name


class RowView:
    """Reads one row. `names` is the `columns` setting. It maps expected names to the names in the file.

    Dots in a name lead into objects: `reward_model.ground_truth` is the field `ground_truth` of the column
    `reward_model`, unless there is a column with the whole name.
    """

    def __init__(self, row: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._row = row
        self._names = names

    def __contains__(self, column: str) -> bool:
        holder, name = _holder(self._row, self.label(column))
        return name in holder

    def label(self, column: str) -> str:
        return self._names.get(column, column)

    def get(self, column: str) -> Any:
        """Return the value, or None if the row has no such column."""
        return value_at(self._row, self.label(column))

    def require(self, column: str) -> Any:
        """Return the value. Raises BadRowError if it is missing or null."""
        label = self.label(column)
        holder, name = _holder(self._row, label)
        if name not in holder:
            inside = label.removesuffix(name).rstrip(".")
            raise BadRowError(
                label,
                f"is missing.{suggestion(name, holder)} {inside or 'The row'} has: {listing(holder)}. "
                f"Add it, or name the column that holds it with `columns: {{{column}: NAME}}`.",
            )
        value = holder[name]
        if value is None:
            raise BadRowError(label, "is null. Give it a value, leave the row out, or set `on_bad_row: skip`.")
        return value

    def text(self, column: str) -> str:
        """Return the value. Raises BadRowError if it is not text."""
        value = self.require(column)
        if not isinstance(value, str):
            raise BadRowError(
                self.label(column),
                f"is {describe(value)}, expected text. Correct the row, or name the column that holds text with "
                f"`columns: {{{column}: NAME}}`.",
            )
        return value

    def instruction(self) -> str:
        """Return the columns `instruction` and, if there is one, `input`, with an empty line between them."""
        instruction = self.text("instruction")
        is_other = self.get("input") is not None and self.label("input") != self.label("instruction")
        extra = self.text("input") if is_other else ""
        return f"{instruction}\n\n{extra}" if extra else instruction


def absent_column_problem(names: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Describe the first name in a `columns` setting that no row has. Return None if there is no such name."""
    missing = dict(names)
    seen: dict[str, None] = {}
    count = 0
    for row in rows:
        count += 1
        view = RowView(row, names)
        missing = {name: label for name, label in missing.items() if name not in view}
        if not missing:
            return None
        seen |= dict.fromkeys(islice(column_paths(row), 1000))
    for name, label in missing.items() if count else ():
        return (
            f"columns.{name} is '{label}', and none of the first {count:,} rows has such a column."
            f"{suggestion(label, seen)} They have: {listing(seen)}. Correct the name, or remove the line."
        )
    return None


def column_paths(row: Mapping[str, Any]) -> Iterable[str]:
    """Yield the columns of a row. After a column with an object, yield the object's fields as `column.field`."""
    for name, value in row.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{field}" for field in cast("Mapping[str, Any]", value))


def unknown_column_problem(names: Mapping[str, str]) -> str | None:
    """Describe the first key of a `columns` setting that no format reads. Return None if there is no such key."""
    for name, label in names.items():
        if name in EXPECTED_COLUMNS:
            continue
        hint = suggestion(name, EXPECTED_COLUMNS)
        if label in EXPECTED_COLUMNS and nearest(name, EXPECTED_COLUMNS) != label:
            hint = f" The expected name comes first: write `columns: {{{label}: {name}}}`."
        return f"columns.{name} is not a column Spurline reads.{hint} Columns: {', '.join(EXPECTED_COLUMNS)}."
    return None
