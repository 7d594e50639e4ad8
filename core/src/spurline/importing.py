"""Import large libraries quickly and quietly, and files of Python code by their paths."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from spurline.terminal import write_nowhere

_TALKERS = ("torchao", "torch.utils._pytree")
"""Loggers that print needless warnings when transformers imports torchao."""

_process = {"is_own": False}


def own_process() -> None:
    """Make `importing` hide imported objects from the garbage collector, which needs 0.3 s each time it examines them.

    Call this only in a process that Spurline has to itself, since all other objects that exist then are hidden too.
    """
    if not _process["is_own"]:
        _process["is_own"] = True
        # Handlers run in reverse order, so this one runs last.
        atexit.register(_silence_errors)


def _silence_errors() -> None:
    """Discard later output to stderr. At exit, libraries warn about hidden objects, since these are never freed."""
    for stream in (sys.stdout, sys.stderr):
        # The reader of the stream may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    write_nowhere(2)


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
        if _process["is_own"]:
            gc.freeze()
        if was_enabled:
            gc.enable()


def module_of_file(file: Path, name: str) -> ModuleType:
    """Import a file as the module `name`. The file may import other files of its folder, as a script can."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    make_importable(file.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def make_importable(folder: Path) -> None:
    """Append a folder to `sys.path`. Being last, its files do not hide installed modules."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
