"""Import large libraries without looking for garbage among what they define."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
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
        with _quiet(_TALKERS):
            yield
        if for_good:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


_TALKERS = ("torchao", "torch.utils._pytree")
"""Loggers of what torchao says while transformers imports it in every process: which of its kernels for GPUs do not
load, and which of its classes a coming torch will refuse. A run that computes by it (`backend.fp8`) checks more."""


@contextmanager
def _quiet(names: Sequence[str]) -> Iterator[None]:
    """Only errors of these loggers."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def quiet_bitsandbytes() -> None:
    """Before bitsandbytes is imported, by PEFT too: it warns of a missing kernel for products on CPUs, which nothing
    here computes by it."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
