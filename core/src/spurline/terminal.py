"""Make text of others, such as data and names, safe to print on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, TextIO

# Escape sequences move the cursor and set the window's title; half a surrogate pair cannot be encoded.
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Write control characters, other than tab and end of line, as escapes."""
    return _NOT_SHOWN.sub(lambda match: ascii(match[0])[1:-1], text)


def json_line(value: Any) -> str:
    """Return one line of JSON in which only control characters are escaped."""
    return _NOT_SHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def standard_input() -> TextIO | None:
    """Return standard input; None where the process was started without one."""
    return sys.stdin


def is_person_asking() -> bool:
    """Return whether somebody at a terminal can answer questions."""
    stream = standard_input()
    return stream is not None and stream.isatty()


def write_nowhere(descriptor: int) -> None:
    """Discard everything that is written to this output from now on. Raises OSError."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, descriptor)
    finally:
        os.close(nothing)
