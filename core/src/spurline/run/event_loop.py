"""Train on a thread whose event loop is running, as that of a notebook is.

A cell runs inside a callback of the notebook's loop, which stands still until the cell ends. asyncio refuses to run
another loop there, although nothing is in its way.
"""

from __future__ import annotations

from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_event_loops() -> Iterator[None]:
    """A context in which loops of this thread may run, whatever loop its caller is a callback of."""
    outer = events._get_running_loop()
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(outer)
