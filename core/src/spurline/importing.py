"""Import large libraries without looking for garbage among what they define."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(*, for_good: bool = False) -> Iterator[None]:
    """A context for imports of torch and its kin.

    They make a million objects that all stay. The garbage collector visits them again and again while their number
    grows, which is a quarter of the time that the imports take.
    for_good: it never visits what there is at the end, for a process of our own: one visit takes 0.3 s. What the
    process held before is then no garbage either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if for_good:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def quiet_bitsandbytes() -> None:
    """Before bitsandbytes is imported, by PEFT too: it warns of a missing kernel for products on CPUs, which nothing
    here computes by it."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
