"""Rows of files of JSON: one object per line, or a list of objects.

They are read here because rows whose fields differ in type must stay readable and a malformed line must be named, which
Hugging Face `datasets` does not do.
"""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spurline.errors import DataError
from spurline_text.rows.rows import describe

_BEGINNING_BYTES = 1 << 16
"""The first character that is not white space decides how a .json file is read; it must be in so many bytes."""
_AHEAD_BYTES = 1 << 14
"""Bytes to read at once if rows are asked for in order: opening the file for each row takes most of the time."""


class JsonLines:
    """One JSON object per line; blank lines are passed over. Holds only where lines begin and how long they are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._sizes, self._lines = array("q"), array("q"), array("q")
        self._expected = 0
        # Position in the file of the bytes that were read last, and those bytes; they may hold the next rows too.
        self._ahead: tuple[int, bytes] = (0, b"")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._starts.append(offset)
                    self._sizes.append(len(line))
                    self._lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        begin, size = self._starts[row], self._sizes[row]
        first, content = self._ahead
        if not first <= begin <= begin + size <= first + len(content):
            first, in_order = begin, row == self._expected
            with self._path.open("rb") as file:
                file.seek(begin)
                content = file.read(max(size, _AHEAD_BYTES) if in_order else size)
            self._ahead = (first, content) if len(content) <= _AHEAD_BYTES else (0, b"")
        self._expected = row + 1
        return read_json_line(content[begin - first : begin - first + size], self.location(row))

    def location(self, row: int) -> str:
        return f"{self._path}:{self._lines[row]}"

    def check(self, rows: range) -> None:
        """Raise DataError for the first of these rows that is not a JSON object."""
        with self._path.open("rb") as file:
            for row in rows:
                file.seek(self._starts[row])
                read_json_line(file.read(self._sizes[row]), self.location(row))


class JsonArray:
    """One JSON list of objects, which is held in memory."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises DataError if it is not a list."""
        self._path = path
        try:
            self._rows: list[Any] = json.loads(path.read_bytes().decode("utf-8-sig", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise _unreadable(str(path), error) from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return _object(self._rows[row], self.location(row))

    def location(self, row: int) -> str:
        return f"{self._path} row {row}"

    def check(self, rows: range) -> None:
        """Raise DataError for the first of these rows that is not an object."""
        for row in rows:
            self[row]


def open_json(path: Path) -> JsonLines | JsonArray:
    """Return the rows of a .json file: a list of objects, or JSON lines under that name."""
    with path.open("rb") as file:
        start = file.read(_BEGINNING_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return JsonArray(path) if start == b"[" else JsonLines(path)


def read_json_line(line: bytes, location: str) -> Mapping[str, Any]:
    """Return the object on one line. Raises DataError with `location` in front."""
    try:
        # What json.loads does with bytes, without finding out which encoding they have: that takes half as long again.
        text = line.rstrip(b"\r\n").removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass")
        values = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(location, error) from error
    return _object(values, location)


_DECODER = json.JSONDecoder()


def _object(values: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        hint = " A file with one JSON list should end in .json." if isinstance(values, list) else ""
        raise DataError(f"{location}: is {describe(values)}, expected a JSON object with named fields.{hint}")
    return values


def _unreadable(location: str, error: ValueError | RecursionError) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"{location}: not valid UTF-8: {error.reason} at byte {error.start + 1}.")
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return DataError(
            f"{location}: not valid JSON: {error.msg} ({line}column {error.colno}). Expected one object per line, or "
            "in a .json file a list of objects."
        )
    if isinstance(error, RecursionError):
        return DataError(f"{location}: not valid JSON: nested too deeply.")
    return DataError(f"{location}: not readable JSON: {error}.")
