"""Import large libraries quickly and quietly."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

_TALKERS = ("torchao", "torch.utils._pytree")
"""Loggers that warn of kernels and classes whenever transformers imports torchao."""


@contextmanager
def importing() -> Iterator[None]:
    """Return a context for large imports. The garbage collector is off, as it would take a quarter of the time."""
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
    """Silence the warning of bitsandbytes about a CPU kernel that nothing here uses, before PEFT imports it."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
