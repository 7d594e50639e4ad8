"""A terminal shows what others may have written (data, models, names, programs), and may be gone before a run ends."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, TextIO

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


def write_nowhere(descriptor: int) -> None:
    """From here on what is written to this output, and what is buffered for it, is lost. Raises OSError."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, descriptor)
    finally:
        os.close(nothing)
