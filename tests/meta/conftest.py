"""Keep Python's collector out of the parsing of sources."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Switch the collector off during a test.

    A finalizer that logs a traceback parses the traceback's lines. Where this happens within `ast.parse`, Python 3.11
    counts the depth of both together and raises SystemError ("recursion depth mismatch").
    """
    gc.disable()
    yield
    gc.enable()
