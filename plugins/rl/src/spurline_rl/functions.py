"""Import functions that a config names: rewards, tools and agents that need no plugin.

A setting has one of three forms:

module:function             a module that is installed or in the working directory
path/to/file.py:function    a file
FOLDER/module:function      a module in this folder
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from spurline.errors import PluginError, SpurlineError, listing, suggestion
from spurline.importing import make_importable, module_of_file
from spurline_rl.function_settings import function_of, is_reference

FUNCTION_PATH = r"^(.*/)?[^/:]+:\w+$"
"""Pattern of the settings that name a function."""


def load_function(path: str, what: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        what: What the setting names, such as `reward function`, for messages.

    Raises:
        PluginError: If the module or the file cannot be imported or does not define the name. Also if the setting
            refers to a function object that was passed in another process.
    """
    if is_reference(path):
        given = function_of(path)
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
