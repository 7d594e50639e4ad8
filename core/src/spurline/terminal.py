"""A terminal shows what others may have written (data, models, names, programs), and may be gone before a run ends."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

# Escape sequences move the cursor and set the window's title; half a surrogate pair cannot be encoded.
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with control characters, other than tab and end of line, written as escapes."""
    return _NOT_SHOWN.sub(lambda match: ascii(match[0])[1:-1], text)


def json_line(value: Any) -> str:
    """One line of JSON: letters as they are, and what a terminal might obey as escapes, which mean the same."""
    return _NOT_SHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def standard_input() -> TextIO | None:
    """None where the process was started without one."""
    return sys.stdin


def is_person_asking() -> bool:
    """Whether somebody at a terminal can answer questions."""
    stream = standard_input()
    return stream is not None and stream.isatty()


class OutputLostError(OSError):
    """Standard output cannot be written, such as to a full disk."""


@contextmanager
def output_told_apart() -> Iterator[None]:
    """What fails in writing to standard output is an `OutputLostError`, so that nobody takes it for something else.

    A reader that has gone (`| head`) stays the BrokenPipeError that it is. What is left in the buffer is written last.
    """
    own: Any = sys.stdout
    if own is None:
        yield
        return
    sys.stdout = cast("TextIO", _ToldApart(own))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    finally:
        # The command line library puts something else there for a reader that has gone, which has to stay.
        if isinstance(sys.stdout, _ToldApart):
            sys.stdout = own


class _ToldApart:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with _as_lost_output():
            return self._file.write(text)

    def flush(self) -> None:
        with _as_lost_output():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def _as_lost_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLostError(error.errno, error.strerror) from error


def write_nowhere(descriptor: int) -> None:
    """From here on what is written to this output, and what is buffered for it, is lost. Raises OSError."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, descriptor)
    finally:
        os.close(nothing)
