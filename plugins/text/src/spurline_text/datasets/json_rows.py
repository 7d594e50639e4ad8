"""Rows of files of JSON: one object per line, or a list of objects.

They are read here, one at a time, because rows whose fields differ in type must stay readable and a malformed line must
be named, which Hugging Face `datasets` does not do.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from spurline.errors import DataError
from spurline_text.configs import TableLimits
from spurline_text.rows.rows import describe

_AHEAD_BYTES = 1 << 14
"""Read at once where rows are asked for in order: opening the file for each takes most of the time."""


class JsonRows:
    """JSON objects in a file. Holds only where they begin and how long they are."""

    def __init__(self, path: Path, limits: TableLimits) -> None:
        self._path, self._limits = path, limits
        self._starts, self._sizes = array("q"), array("q")
        self._expected = 0
        self._ahead: tuple[int, bytes] = (0, b"")
        """What was read beyond the last row, and its first byte in the file."""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        begin, size = self._place(row)
        first, content = self._ahead
        if not first <= begin <= begin + size <= first + len(content):
            first, in_order = begin, row == self._expected
            with self._path.open("rb") as file:
                file.seek(begin)
                content = file.read(max(size, _AHEAD_BYTES) if in_order else size)
            self._ahead = (first, content) if len(content) <= _AHEAD_BYTES else (0, b"")
        self._expected = row + 1
        line = content[begin - first : begin - first + size]
        return read_json_line(line, self.location(row), checks_keys=self._limits.checks_keys)

    def location(self, row: int) -> str:
        return f"{self._path} row {row}"

    def check(self, rows: range) -> None:
        """Raise DataError for the first of these rows that is not a JSON object."""
        with self._path.open("rb") as file:
            for row in rows:
                begin, size = self._place(row)
                file.seek(begin)
                read_json_line(file.read(size), self.location(row))

    def _place(self, row: int) -> tuple[int, int]:
        """First byte and number of bytes of a row. Raises DataError for one that is too large."""
        if self._sizes[row] > self._limits.max_row_bytes:
            raise self._limits.too_large_row(self.location(row))
        return self._starts[row], self._sizes[row]


class JsonLines(JsonRows):
    """One JSON object per line; blank lines are passed over."""

    def __init__(self, path: Path, limits: TableLimits) -> None:
        super().__init__(path, limits)
        self._lines = array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(pieces_of_lines(file, limits), start=1):
                size = len(line)
                if size > limits.max_row_bytes:
                    size += skip_line(file)
                if line.strip():
                    self._starts.append(offset)
                    self._sizes.append(size)
                    self._lines.append(number)
                offset += size

    def location(self, row: int) -> str:
        return f"{self._path}:{self._lines[row]}"


def pieces_of_lines(file: BinaryIO, limits: TableLimits) -> Iterator[bytes]:
    """Lines; of one that is too large its beginning, which has a byte too many. Then `skip_line` goes to the next."""
    return iter(functools.partial(file.readline, limits.max_row_bytes + 1), b"")


def skip_line(file: BinaryIO) -> int:
    """Pass over the rest of a line; returns its bytes."""
    size = 0
    while piece := file.readline(1 << 20):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def read_json_line(line: bytes, location: str, *, checks_keys: bool = True) -> Mapping[str, Any]:
    """The object on one line. Raises DataError with `location` in front. checks_keys: whether also for a key that
    stands in it twice, which takes a third as long again."""
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
    row = _require_object(values, location)
    if checks_keys and (keys := _num_keys(row)) != line.count(b":") and not _has_marks(line, keys):
        _refuse_repeated(text, location)
    return row


def _needs_more(error: json.JSONDecodeError) -> bool:
    """Whether the text was well formed up to its end."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())


def _num_keys(values: Mapping[str, Any]) -> int:
    """Keys of this object and all inside it."""
    keys = len(values)
    for value in values.values():
        if isinstance(value, dict):
            keys += _num_keys(value)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    keys += _num_keys(item)
                elif isinstance(item, list):
                    keys += _num_keys({"": item}) - 1
    return keys


def _has_marks(line: bytes, keys: int) -> bool:
    """Whether as many keys were written, each with a quote and a colon behind it, which inside a text is escaped."""
    marks = line.count(b'":')
    return b'" :' not in line and (marks == keys or marks - line.count(b'\\":') == keys)


def _refuse_repeated(text: str, location: str) -> None:
    """Raise DataError for a key that an object has twice; `json` takes the last, and the other value is lost. Reading
    with this takes twice as long, so only rows whose keys do not add up come here."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise DataError(
                f"{location}: the key {repeated!r} stands {names.count(repeated)} times in one object, and only "
                "the last would be read. Rename or remove the others."
            )
        return found

    json.loads(text, object_pairs_hook=check)


class JsonArray(JsonRows):
    """One JSON list of objects, of which one is held at a time."""

    def __init__(self, path: Path, limits: TableLimits) -> None:
        """Raises DataError where it is not a list of values."""
        super().__init__(path, limits)
        with path.open("rb") as file:
            text = _ArrayText(file, path, limits)
            text.expect("[")
            closed = text.next_is("]")
            while not closed:
                begin, size = text.take_value(self.location(len(self)))
                self._starts.append(begin)
                self._sizes.append(size)
                closed = text.next_is("]")
                if not closed:
                    text.expect(",")
            text.expect_end()


class _ArrayText:
    """The text of a JSON file, read on where more of it is needed; what has been taken is let go of then."""

    def __init__(self, file: BinaryIO, path: Path, limits: TableLimits) -> None:
        self._file, self._path, self._limits = file, path, limits
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._place = 0
        """In the text."""
        self._byte = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        """Of that place, in the file."""
        file.seek(self._byte)
        self._line = self._column = 1
        """Of the text's beginning."""
        self._ended = False

    def expect(self, mark: str) -> None:
        """Go past this character, and any space before it. Raises DataError where another comes."""
        if not self.next_is(mark):
            raise self._error(f"Expecting {mark!r} delimiter", self._place)

    def next_is(self, mark: str) -> bool:
        """Whether this character comes next, after any space; then it is gone past."""
        self._skip_space()
        found = self._text.startswith(mark, self._place)
        self._go_to(self._place + found)
        return found

    def expect_end(self) -> None:
        """Raises DataError where anything but space comes."""
        self._skip_space()
        if self._place < len(self._text):
            raise self._error("Extra data", self._place)

    def take_value(self, location: str) -> tuple[int, int]:
        """First byte and number of bytes of the JSON value that comes next. Raises DataError where none does."""
        self._skip_space()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error):
                    raise self._error(error.msg, error.pos) from error
            except RecursionError as error:
                raise DataError(f"{location}: not valid JSON: nested too deeply.") from error
            except ValueError as error:
                raise DataError(f"{location}: not readable JSON: {error}.") from error
            else:
                # At the end of what was read a number may go on.
                if end < len(self._text) or self._ended:
                    begin = self._byte
                    self._go_to(end)
                    return begin, self._byte - begin
            if len(self._text) - self._place > self._limits.max_row_bytes:
                raise self._limits.too_large_row(location)
            self._read_on()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the value may be whole where the file goes on: a string that does not end, or a word or mark at the
        end of what was read."""
        return error.msg.startswith("Unterminated string") or len(self._text) - error.pos < _LONGEST_MARK

    def _skip_space(self) -> None:
        while True:
            space = _SPACE.match(self._text, self._place)
            self._go_to(space.end() if space else self._place)
            if self._place < len(self._text) or self._ended:
                return
            self._read_on()

    def _go_to(self, place: int) -> None:
        self._byte += len(self._text[self._place : place].encode())
        self._place = place

    def _read_on(self) -> None:
        self._line, self._column = self._position(self._place)
        rest = self._text[self._place :]
        # As much again as there is: a long value is then looked at a few times, however long.
        content = self._file.read(max(_CHUNK_BYTES, len(rest)))
        self._ended = not content
        try:
            self._text, self._place = rest + self._decoder.decode(content, final=self._ended), 0
        except UnicodeDecodeError as error:
            line = self._line + rest.count("\n") + content.count(b"\n", 0, error.start)
            raise DataError(f"{self._path}:{line}: not valid UTF-8: {error.reason}.") from error

    def _position(self, place: int) -> tuple[int, int]:
        """Line and column in the file, counted from 1."""
        lines = self._text.count("\n", 0, place)
        return self._line + lines, place - self._text.rfind("\n", 0, place) if lines else self._column + place

    def _error(self, message: str, place: int) -> DataError:
        line, column = self._position(place)
        unterminated = message.startswith("Unterminated string")
        cut = _CUT if self._ended and (unterminated or place >= len(self._text.rstrip())) else ""
        return DataError(f"{self._path}:{line}: not valid JSON: {message} (column {column}).{cut}")


_CUT = " The file ends there, within a row: was it cut when it was written or copied?"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_CHUNK_BYTES = 1 << 20
_LONGEST_MARK = 16
"""Characters that a decoder needs to see at once: `-Infinity`, or a pair of surrogates as escapes."""


def _require_object(values: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise DataError(f"{location}: is {describe(values)}, expected a JSON object with named fields.")
    return values


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


def open_json(path: Path, limits: TableLimits) -> JsonRows:
    """Rows of a .json file: a list of objects, or JSON lines under that name."""
    with path.open("rb") as file:
        start = file.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if start == b"[":
        return JsonArray(path, limits)
    lines = JsonLines(path, limits)
    if start == b"{" and len(lines) > 1 and path.stat().st_size <= limits.max_row_bytes:
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
