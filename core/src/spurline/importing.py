"""Import large libraries quickly and quietly."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

_TALKERS = ("torchao", "torch.utils._pytree")
"""Loggers of what torchao says while transformers imports it in every process: which of its kernels for GPUs do not
load, and which of its classes a coming torch will refuse. A run that computes by it (`backend.fp8`) checks more."""


@contextmanager
def importing() -> Iterator[None]:
    """Enter a context for imports of torch and its kin.

    They make a million objects that all stay. The garbage collector would visit them again and again while their number
    grows, which is a quarter of the time that the imports take.
    """
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
    """Silence a warning of bitsandbytes, before it is imported, PEFT being one who does.

    It warns of a missing kernel for products on CPUs, which nothing here computes by it.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
