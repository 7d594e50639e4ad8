"""Text on a terminal that others may have written: data, models, names, programs."""

from __future__ import annotations

import re

# Escape sequences move the cursor and set the window's title; half a surrogate pair cannot be encoded.
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with control characters, other than tab and end of line, written as escapes."""
    return _NOT_SHOWN.sub(lambda match: ascii(match[0])[1:-1], text)
