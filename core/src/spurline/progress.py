"""What a start says while it works: one seam, handed down from whoever begins a run.

A `Progress` takes a short text in the present tense, without an end mark: `tokenizing 1,200 rows`. It is called between
pieces of work, on the thread that does them. From Python a run is silent unless it is given one.
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """Say nothing."""
