"""Make text that comes from data or other people safe to print, and check and redirect standard streams."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

# Escape sequences could move the cursor or change the window's title. Half a surrogate pair cannot be encoded.
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with control characters as escapes. Tabs and newlines stay as they are."""
    return _NOT_SHOWN.sub(lambda match: ascii(match[0])[1:-1], text)


def tell(message: str) -> None:
    """Print a message of a run to standard error, with control characters as escapes."""
    print(printable(message), file=sys.stderr, flush=True)


def json_line(value: Any) -> str:
    """Return one line of JSON in which only control characters are escaped."""
    return _NOT_SHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def is_person_asking() -> bool:
    """Return whether standard input is a terminal, at which somebody can answer questions."""
    # If the process was started without standard input, `sys.stdin` is None.
    return sys.stdin is not None and sys.stdin.isatty()


def write_nowhere(descriptor: int) -> None:
    """Discard everything that is written to this file descriptor from now on. Raises OSError."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, descriptor)
    finally:
        os.close(nothing)
