"""Represent functions as text, so that a Python program can put them into a config.

A loaded config contains references such as `in-memory.3:reward`. A run records `in-memory:reward` instead, without the
number, since the same function may have a different number in another process.
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
    """Return a function's name as an identifier: `lambda` for a lambda, the name of its class for another callable."""
    return re.sub(r"\W", "", str(getattr(function, "__name__", type(function).__name__))) or "function"


def reference_to(function: Callable[..., Any]) -> str:
    """Return a new reference to a function, which `function_of` resolves in this process until `forget` is called.

    Each call returns a different reference, so a notebook cell may redefine `reward` without changing earlier configs.
    """
    reference = f"in-memory.{next(_numbers)}:{name_of(function)}"
    _functions[reference] = function
    return reference


def forget(references: Iterable[str]) -> None:
    """Drop the functions of these references, so that the functions and the objects they refer to can be freed."""
    for reference in references:
        _functions.pop(reference, None)


def is_reference(path: str) -> bool:
    """Return whether the path is a reference to a function of this or another process."""
    return _REFERENCE.fullmatch(path) is not None


def function_of(reference: str) -> Callable[..., Any] | None:
    """Return the function, or None if the reference comes from another process or from the record of a run."""
    return _functions.get(reference)


def recorded(path: str) -> str:
    """Return the path as a run records it: a reference loses its number, and other paths are unchanged."""
    found = _REFERENCE.fullmatch(path)
    return path if found is None else f"in-memory:{found[2]}"
