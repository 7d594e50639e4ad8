"""Make text that comes from data or other people safe to print, and redirect standard streams."""

from __future__ import annotations

import os
import re
import sys

# Escape sequences could move the cursor or change the window's title. Half a surrogate pair cannot be encoded.
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with control characters as escapes. Tabs and newlines stay as they are."""
    return _NOT_SHOWN.sub(lambda match: ascii(match[0])[1:-1], text)


def tell(message: str) -> None:
    """Print a message of a run to standard error, with control characters as escapes."""
    print(printable(message), file=sys.stderr, flush=True)


def write_nowhere(descriptor: int) -> None:
    """Discard everything that is written to this file descriptor from now on. Raises OSError."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, descriptor)
    finally:
        os.close(nothing)
