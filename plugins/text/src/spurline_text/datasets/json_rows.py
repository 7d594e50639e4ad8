"""Rows of JSON files: one object per line, or a list of objects.

Unlike Hugging Face `datasets`, this module reads rows whose fields differ in type, and names the line of a malformed
row.
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
"""Bytes at the start of a .json file that are searched for the first character, which shows the kind of file."""
_AHEAD_BYTES = 1 << 14
"""Bytes to read at once if rows are read in order. Opening the file for each row would take most of the time."""


class JsonLines:
    """Rows of a file with one JSON object per line. Blank lines are skipped. Only positions of lines stay in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._sizes, self._lines = array("q"), array("q"), array("q")
        self._expected = 0
        # The bytes that were read last, and their position. They may contain the next rows.
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


class JsonArray:
    """Rows of a file with one JSON list of objects. All rows are in memory."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises DataError if it is not valid JSON."""
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


def open_json(path: Path) -> JsonLines | JsonArray:
    """Return the rows of a .json file, which contains a list of objects or JSON lines."""
    with path.open("rb") as file:
        start = file.read(_BEGINNING_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return JsonArray(path) if start == b"[" else JsonLines(path)


def read_json_line(line: bytes, location: str) -> Mapping[str, Any]:
    """Return the object on one line. Raises DataError that begins with `location`."""
    try:
        # json.loads would also detect the encoding of the bytes, and would take 50% longer.
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
    what = str(error)
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        what = f"{error.msg} ({line}column {error.colno})"
    return DataError(
        f"{location}: not valid JSON: {what}. Expected one object per line, or in a .json file a list of objects."
    )
