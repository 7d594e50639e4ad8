"""Import large libraries quickly and quietly."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

_TALKERS = ("torchao", "torch.utils._pytree")
"""Loggers that print needless warnings when transformers imports torchao."""


@contextmanager
def importing() -> Iterator[None]:
    """Return a context for large imports. It turns the garbage collector off, which saves a quarter of the time."""
    was_enabled = gc.isenabled()
    loggers = [logging.getLogger(name) for name in _TALKERS]
    levels = [logger.level for logger in loggers]
    gc.disable()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if was_enabled:
            gc.enable()


def quiet_bitsandbytes() -> None:
    """Silence a warning of bitsandbytes about a CPU kernel that is not used. Call this before PEFT imports it."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
