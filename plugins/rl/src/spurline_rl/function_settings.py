"""Mark settings that name Python functions. A program may give a function itself, which is represented as text.

A loaded config contains references such as `in-memory.3:reward`. A run records `in-memory:reward` instead, without the
number, since the same function may have a different number in another process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from spurline.config.paths import ConfigPlace, expanded

_REFERENCE = re.compile(r"in-memory(\.\d+)?:(\w+)")
_functions: dict[str, Callable[..., Any]] = {}
_numbers = itertools.count()


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name as an identifier: `lambda` for a lambda, the name of its class for another callable."""
    return re.sub(r"\W", "", str(getattr(function, "__name__", type(function).__name__))) or "function"


def _reference_to(function: Callable[..., Any]) -> str:
    """Return a new reference to a function, which `function_of` resolves in this process.

    Each call returns a different reference, so a notebook cell may redefine `reward` without changing earlier configs.
    """
    reference = f"in-memory.{next(_numbers)}:{name_of(function)}"
    _functions[reference] = function
    return reference


def is_reference(path: str) -> bool:
    """Return whether the path is a reference to a function of this or another process."""
    return _REFERENCE.fullmatch(path) is not None


def function_of(reference: str) -> Callable[..., Any] | None:
    """Return the function, or None if the reference comes from another process or from the record of a run."""
    return _functions.get(reference)


def _recorded(path: str) -> str:
    """Return the path as a run records it: a reference loses its number, and other paths are unchanged."""
    found = _REFERENCE.fullmatch(path)
    return path if found is None else f"in-memory:{found[2]}"


@dataclass(frozen=True)
class FunctionSetting:
    """Mark of a setting that names a Python function: `module:function`, or `file.py:function`.

    A file is searched for in the same folders as a `PathSetting` with `reads`. A module beside the config file or in
    the working directory becomes `FOLDER/module:function`. Any other module is imported by its name. Text without a
    colon is not changed. If a Python program gives the function itself, the value becomes a reference to it.

    Attributes:
        method: A Python program may also give an object that has this method.
    """

    method: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(
            _recorded, return_schema=core_schema.str_schema(), when_used="json-unless-none"
        )
        return core_schema.with_info_before_validator_function(self._read, handler(source), serialization=written)

    def _read(self, value: Any, info: ValidationInfo) -> Any:
        place: ConfigPlace | None = info.context
        if callable(value) or (self.method is not None and callable(getattr(value, self.method, None))):
            reference = _reference_to(value)
            if place is not None:
                # Otherwise the table would keep the function alive, and any model that the function refers to.
                place.freed.callback(_functions.pop, reference)
            return reference
        if not isinstance(value, str) or ":" not in value or (place is not None and place.recorded):
            return value
        module, _, function = expanded(value).rpartition(":")
        if place is None:
            return f"{module}:{function}"
        folder, slash, name = module.rpartition("/")
        if module.endswith(".py"):
            return f"{place.find(module) or module}:{function}"
        if slash:
            return f"{place.find(folder) or folder}/{name}:{function}"
        top = module.partition(".")[0]
        homes = (home for home in place.homes() if _has_module(home, top))
        return next((f"{home}/{module}:{function}" for home in homes), f"{module}:{function}")


def _has_module(folder: Path, module: str) -> bool:
    return (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()
