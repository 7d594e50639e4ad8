"""Import functions that a config names: rewards, tools and agents that need no plugin.

There are two ways to write one: `module:function`, of anything importable or a file in the working directory, and
`path/to/file.py:function`. `FOLDER/module:function` is a module of that folder. One loader serves every setting that
holds such a name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from spurline.config.functions import function_of, is_reference
from spurline.errors import PluginError, SpurlineError, listing, suggestion

FUNCTION_PATH = r"^(.*/)?[^/:]+:\w+$"
"""Pattern of the settings that name a function."""


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function. what: names the setting in messages, such as `reward function`.

    Raises:
        PluginError: For a function that was given as an object in another process, and when module or file cannot be
            found or imported, or has no such name.
    """
    if is_reference(path):
        given = function_of(path)
        if given is None:
            raise PluginError(
                f"The {what} is '{path}', a function that a Python program gave as an object; it was in that process "
                "alone. Train from Python with the function again, or write it in a file, and name that: "
                f"`my_functions.py:{path.rpartition(':')[2]}`."
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
    # A console script does not see the folder it is started in, where a config's functions usually are.
    _make_importable(Path(folder or "/") if slash else Path.cwd())
    module = importlib.import_module(name)
    if slash and not str(module.__file__).startswith(f"{folder}/"):
        raise PluginError(
            f"The {what} names {path}, but '{name}' is {module.__file__}, a module that is installed or was imported "
            f"before. Rename yours, or name its file: {folder}/{name.replace('.', '/')}.py:{path.rpartition(':')[2]}."
        )
    return module


def _from_file(file: Path, what: str) -> ModuleType:
    """The module of a file, imported once as long as the file stays as it is."""
    file = Path(os.path.expandvars(file)).expanduser().absolute()
    if not file.is_file():
        near = sorted(entry.name for entry in file.parent.glob("*.py"))
        raise PluginError(
            f"The {what} names the file {file}, which does not exist.{suggestion(file.name, near)} Python files in "
            f"{file.parent}: {listing(near)}. An installed module is written `module:function`."
        )
    content = file.read_bytes()
    # By its content too: a notebook that changed the file wants the new one.
    name = f"{file.stem}-{xxhash.xxh3_64_hexdigest(os.fsencode(file) + content)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    # What lies beside it can be imported, as from a script.
    _make_importable(file.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _make_importable(folder: Path) -> None:
    # Last on the path, so that no file there hides an installed module.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _explain(error: Exception, source: str) -> str:
    """The error, where in the code it came from, and what to do about a module that is not there."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None and source.split(".")[0] == error.name:
        near = suggestion(source, [file.stem for file in Path.cwd().glob("*.py")])
        return (
            f"{text}.{near} Install it, put it beside the "
            f"config file or where the command runs, or give the file itself: `path/to/{source}.py:...`."
        )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{text}{place}.{hidden_module(error)}"


def hidden_module(error: BaseException) -> str:
    """` FILE is hidden ...` where code misses something in a module that it may have taken for the file of this name
    beside it; else empty."""
    name: Any = None
    if isinstance(error, ImportError):
        name = error.name
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__
    module = sys.modules.get(name) if isinstance(name, str) else None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    if module is None or not frames:
        return ""
    beside = Path(frames[-1].filename).absolute().parent / f"{module.__name__}.py"
    imported = getattr(module, "__file__", None) or "part of Python itself"
    if not beside.is_file() or imported == str(beside):
        return ""
    return (
        f" {beside} is hidden by the module '{module.__name__}' that is installed ({imported}): what lies beside a "
        "function comes last, so that it takes no module's place in the run. Rename that file."
    )
