"""The comparison that `math_verify` runs in its worker processes. Imports sympy, which takes seconds."""

from __future__ import annotations

from typing import Any

import math_verify


def equal(reference: str, response: str) -> bool | None:
    """Whether the response ends in what the reference says; None when the reference says nothing that can be parsed."""
    gold = _parse(reference) or _parse(f"${reference}$")
    if not gold:
        return None
    # No time limits of the library's own: they are signals, and this process is killed when it takes too long.
    return bool(math_verify.verify(gold, _parse(response), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
