"""Rows of files of JSON: one object per line, or a list of objects.

They are read here, one at a time, because rows whose fields differ in type must stay readable and a malformed line must
be named, which Hugging Face `datasets` does not do.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spurline.errors import DataError
from spurline_text.rows.rows import describe

_BEGINNING_BYTES = 1 << 16
"""Bytes at the beginning of a file within which its first character other than space is looked for."""
_AHEAD_BYTES = 1 << 14
"""Bytes to read at once if rows are asked for in order, since opening the file for each would take most of the time."""


class JsonRows:
    """JSON objects in a file. Holds only where they begin and how long they are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._sizes = array("q"), array("q")
        self._expected = 0
        self._ahead: tuple[int, bytes] = (0, b"")
        """Position in the file of what was read last, and those bytes; they may hold the next rows too."""

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
        return f"{self._path} row {row}"

    def check(self, rows: range) -> None:
        """Raise DataError for the first of these rows that is not a JSON object."""
        with self._path.open("rb") as file:
            for row in rows:
                file.seek(self._starts[row])
                read_json_line(file.read(self._sizes[row]), self.location(row))


class JsonLines(JsonRows):
    """One JSON object per line; blank lines are passed over."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lines = array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._starts.append(offset)
                    self._sizes.append(len(line))
                    self._lines.append(number)
                offset += len(line)

    def location(self, row: int) -> str:
        return f"{self._path}:{self._lines[row]}"


class JsonArray(JsonRows):
    """One JSON list of objects. Opening reads all of its text; then one object is held at a time."""

    def __init__(self, path: Path) -> None:
        """Find where the objects are. Raises DataError where the file is not a list of values."""
        super().__init__(path)
        content = path.read_bytes()
        try:
            text = content.decode("utf-8-sig", "surrogatepass")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise DataError(f"{path}:{line}: not valid UTF-8: {error.reason}.") from error
        byte = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
        place = 0
        try:
            for begin, end in _values_of_list(text):
                byte += _num_bytes(text[place:begin])
                self._starts.append(byte)
                self._sizes.append(_num_bytes(text[begin:end]))
                byte, place = byte + self._sizes[-1], end
        except json.JSONDecodeError as error:
            cut = _CUT if _needs_more(error) else ""
            raise DataError(
                f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno}).{cut}"
            ) from error
        except RecursionError as error:
            raise DataError(f"{self.location(len(self))}: not valid JSON: nested too deeply.") from error
        except ValueError as error:
            raise DataError(f"{self.location(len(self))}: not readable JSON: {error}.") from error


def _values_of_list(text: str) -> Iterator[tuple[int, int]]:
    """Yield the characters `[begin, end)` of each value of a JSON list. Raises JSONDecodeError."""
    place = _past(text, "[", 0)
    is_first = True
    while not text.startswith("]", place):
        if not is_first:
            place = _past(text, ",", place)
        is_first = False
        _, end = _DECODER.raw_decode(text, place)
        yield place, end
        place = _past_space(text, end)
    end = _past_space(text, place + 1)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _past(text: str, mark: str, place: int) -> int:
    """Return the place after this mark and the space around it. Raises JSONDecodeError where another comes."""
    place = _past_space(text, place)
    if not text.startswith(mark, place):
        raise json.JSONDecodeError(f"Expecting {mark!r} delimiter", text, place)
    return _past_space(text, place + 1)


def _past_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def read_json_line(line: bytes, location: str) -> Mapping[str, Any]:
    """Return the object on one line. Raises DataError with `location` in front."""
    try:
        # As json.loads reads bytes, which takes half as long again to find out which encoding they have.
        text = line.rstrip(b"\r\n").removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass")
        values = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        cut = _CUT if error.reason == "unexpected end of data" else ""
        raise DataError(f"{location}: not valid UTF-8: {error.reason} at byte {error.start + 1}.{cut}") from error
    except json.JSONDecodeError as error:
        hint = " A file with one JSON list should end in .json." if line.lstrip().startswith(b"[") else ""
        # Every line but the last ends with a line break.
        cut = _CUT if not line.endswith(b"\n") and _needs_more(error) else ""
        raise DataError(f"{location}: not valid JSON: {error.msg} (column {error.pos + 1}).{hint}{cut}") from error
    except RecursionError as error:
        raise DataError(f"{location}: not valid JSON: nested too deeply.") from error
    except ValueError as error:
        raise DataError(f"{location}: not readable JSON: {error}.") from error
    if not isinstance(values, dict):
        raise DataError(f"{location}: is {describe(values)}, expected a JSON object with named fields.")
    return values


def _needs_more(error: json.JSONDecodeError) -> bool:
    """Return whether the text was well formed up to its end."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())


_CUT = " The file ends there, within a row: was it cut when it was written or copied?"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


_OTHER_CONTENT: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1\x15", "a Parquet table", "Rename it so that it ends in .parquet."),
    (b"ARROW1\0\0", "an Arrow table", "Rename it so that it ends in .arrow."),
    (b"\x1f\x8b", "compressed with gzip", "Unpack it: `gunzip < FILE > OTHER`."),
    (b"PK\x03\x04", "a zip archive", "Unpack it: `unzip FILE`."),
    *(
        (start, "UTF-16 text", "Convert it: `iconv -f UTF-16 -t UTF-8 FILE > OTHER`.")
        for start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"{\0", b"[\0", b"\0{", b"\0[")
    ),
)
"""How a file begins that is no text in UTF-8, what it is, and what to do."""


def refuse_other_content(path: Path) -> None:
    """Raise DataError for a file of text that is something else by its content, whatever its name says."""
    with path.open("rb") as file:
        start = file.read(8)
    for begins, what, fix in _OTHER_CONTENT:
        if start.startswith(begins):
            raise DataError(f"{path}: is {what}, although its name ends in {path.suffix}. {fix}")


def open_json(path: Path) -> JsonRows:
    """Return the rows of a .json file: a list of objects, or JSON lines under that name."""
    with path.open("rb") as file:
        start = file.read(_BEGINNING_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if start == b"[":
        return JsonArray(path)
    lines = JsonLines(path)
    if start == b"{" and len(lines) > 1:
        content = path.read_bytes()
        if not _is_json(content.splitlines()[0]) and _is_json(content):
            raise DataError(
                f"{path}: holds one JSON object. Expected a list of objects, or one object per line, each a row."
            )
    return lines


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True
