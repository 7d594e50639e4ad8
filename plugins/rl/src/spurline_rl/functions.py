"""Settings that name Python functions, and the import of these functions: rewards, tools and agents without a plugin.

A setting has one of three forms:

module:function             a module that is installed or in the working directory
path/to/file.py:function    a file
FOLDER/module:function      a module in this folder

A program may give a function itself. A loaded config then contains a reference to it, such as `in-memory.3:reward`. A
run records `in-memory:reward`, without the number, since the function may have another number in another process.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash
from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from spurline.config.paths import ConfigPlace, expanded
from spurline.errors import PluginError, SpurlineError, listing, suggestion
from spurline.importing import make_importable, module_of_file

FUNCTION_PATH = r"^(.*/)?[^/:]+:\w+$"
"""Pattern of the settings that name a function."""

_REFERENCE = re.compile(r"in-memory(\.\d+)?:(\w+)")
_functions: dict[str, Callable[..., Any]] = {}
_numbers = itertools.count()


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name as an identifier: `lambda` for a lambda, the name of its class for another callable."""
    return re.sub(r"\W", "", str(getattr(function, "__name__", type(function).__name__))) or "function"


def _reference_to(function: Callable[..., Any]) -> str:
    """Return a new reference to a function, which `load_function` resolves in this process.

    Each call returns a different reference, so a notebook cell may redefine `reward` without changing earlier configs.
    """
    reference = f"in-memory.{next(_numbers)}:{name_of(function)}"
    _functions[reference] = function
    return reference


def is_reference(path: str) -> bool:
    """Return whether the path is a reference to a function of this or another process."""
    return _REFERENCE.fullmatch(path) is not None


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


def load_function(path: str, what: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        what: What the setting names, such as `reward function`, for messages.

    Raises:
        PluginError: If the module or the file cannot be imported or does not define the name. Also if the setting
            refers to a function object that was passed in another process.
    """
    if is_reference(path):
        given = _functions.get(path)
        if given is None:
            raise PluginError(
                f"The {what} is '{path}', an object of another Python process. Pass the function again, or write it in "
                f"a file and set `my_functions.py:{path.rpartition(':')[2]}`."
            )
        return given
    source, _, name = path.rpartition(":")
    try:
        module = _from_file(Path(source), what) if source.endswith(".py") else _from_name(source, path, what)
    except SpurlineError:
        raise
    except Exception as error:
        raise PluginError(f"The {what} cannot be imported from '{path}': {_explain(error, source)}") from error
    if not hasattr(module, name):
        functions = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise PluginError(
            f"The {what} names '{path}', but {source} has no '{name}'.{suggestion(name, functions)} "
            f"It has: {listing(functions)}."
        )
    return getattr(module, name)


def _from_name(source: str, path: str, what: str) -> ModuleType:
    folder, slash, name = source.rpartition("/")
    # In a console script, Python does not search the working directory, where users' functions usually are.
    make_importable(Path(folder or "/") if slash else Path.cwd())
    module = importlib.import_module(name)
    if slash and not str(module.__file__).startswith(f"{folder}/"):
        raise PluginError(
            f"The {what} names {path}, but '{name}' is already the module {module.__file__}. Rename yours, or name its "
            f"file: {folder}/{name.replace('.', '/')}.py:{path.rpartition(':')[2]}."
        )
    return module


def _from_file(file: Path, what: str) -> ModuleType:
    """Return the module of a file. A file that has not changed is imported only once."""
    file = Path(os.path.expandvars(file)).expanduser().absolute()
    if not file.is_file():
        near = sorted(entry.name for entry in file.parent.glob("*.py"))
        raise PluginError(
            f"The {what} names the file {file}, which does not exist.{suggestion(file.name, near)} Python files in "
            f"{file.parent}: {listing(near)}. An installed module is written `module:function`."
        )
    content = file.read_bytes()
    # The content is part of the name, so that a notebook imports a changed file again.
    name = f"{file.stem}-{xxhash.xxh3_64_hexdigest(os.fsencode(file) + content)}"
    return sys.modules[name] if name in sys.modules else module_of_file(file, name)


def _explain(error: Exception, source: str) -> str:
    """Return the error with its place in the code, and the fix for a missing module."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None and source.split(".")[0] == error.name:
        near = suggestion(source, [file.stem for file in Path.cwd().glob("*.py")])
        return (
            f"{text}.{near} Install it, put it beside the "
            f"config file or where the command runs, or give the file itself: `path/to/{source}.py:...`."
        )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{text}{place}."
