"""Refer to functions of this process by text.

A loaded config holds references such as `in-memory.3:reward`. A run writes down `in-memory:reward`, which is the same
text for the same function in the next process. This module imports only the standard library.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

_REFERENCE = re.compile(r"in-memory(\.\d+)?:(\w+)")
_functions: dict[str, Callable[..., Any]] = {}
_numbers = itertools.count()


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name as an identifier: `lambda` for a lambda, its class's name for another object."""
    return re.sub(r"\W", "", str(getattr(function, "__name__", type(function).__name__))) or "function"


def reference_to(function: Callable[..., Any]) -> str:
    """Return a reference that `function_of` understands in this process until `forget`.

    Each call returns a new one, so a notebook cell that redefines `reward` does not change configs loaded before.
    """
    reference = f"in-memory.{next(_numbers)}:{name_of(function)}"
    _functions[reference] = function
    return reference


def forget(references: Iterable[str]) -> None:
    """Release functions, and the objects that they hold."""
    for reference in references:
        _functions.pop(reference, None)


def is_reference(path: str) -> bool:
    """Return whether the path is a reference to a function, of this or another process."""
    return _REFERENCE.fullmatch(path) is not None


def function_of(reference: str) -> Callable[..., Any] | None:
    """Return the function; None if another process made the reference, or a run wrote it down."""
    return _functions.get(reference)


def recorded(path: str) -> str:
    """Return the path as a run writes it down."""
    found = _REFERENCE.fullmatch(path)
    return path if found is None else f"in-memory:{found[2]}"
