"""Say in one line what an unexpected exception was, and where in the code."""

from __future__ import annotations

import traceback


def located(error: BaseException) -> str:
    """`ValueError: no such unit (rewards.py:12 in grade)`: the innermost place the exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
