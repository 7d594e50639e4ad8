"""Report what a run is doing while it starts.

A `Progress` is a function that takes a short text in the present tense, without a full stop: `tokenizing 1,200 rows`.
It is called on the thread that does the work, and by `waiting` on another thread. A run that is started from Python is
silent unless the program passes a `Progress`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str], None]

REPEAT_S = 15.0
"""Seconds after which `waiting` repeats what it waits for."""


def silent(text: str) -> None:
    """Ignore the text. This is the `Progress` of a silent run."""


@contextmanager
def waiting(progress: Progress, text: str, limit: str = "") -> Iterator[None]:
    """Report that work begins, and repeat every 15 s that it is still under way, until the block ends.

    Use this around work in other processes, and in libraries that report nothing themselves.

    Args:
        progress: Receives the texts.
        text: The work, such as `loading weights`.
        limit: How long the work may take, in words. The repeated texts include it.
    """
    progress(text)
    began, ended = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not ended.wait(REPEAT_S):
            facts = [f"{time.monotonic() - began:.0f} s", *([limit] if limit else [])]
            progress(f"still {text} ({'; '.join(facts)})")

    thread = threading.Thread(target=repeat, name="spurline-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
