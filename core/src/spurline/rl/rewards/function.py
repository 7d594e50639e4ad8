"""Import functions that a config names as `module:function`: rewards and tools that need no plugin.

Reward `function`: a Python function named in the config, with a time limit.

def short_and_right(answer: Answer) -> float:
    return float(answer.reference in answer.response) - 0.001 * len(answer.response)
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from spurline.errors import ConfigError, PluginError, listing, suggestion
from spurline.plugins.registry import resolve
from spurline.protocols.reward import Answer
from spurline.rl.concurrency import within
from spurline.rl.rewards.configs import FunctionRewardConfig


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function of `module:function`, of `file.py:function`, or of a module in a folder, `FOLDER/module:function`.

    A module without a folder is imported by its name, from the working directory too. Raises PluginError naming `what`.
    """
    module, _, function = path.rpartition(":")
    folder, slash, name = module.rpartition("/")
    # A console script does not see the folder it is started in, nor that of its config. Last on the path, so that no
    # file there hides an installed module.
    home = folder or "/" if slash else os.getcwd()
    if home not in sys.path:
        sys.path.append(home)
    if module.endswith(".py"):
        return resolve(f"{_import_file(Path(module), what)}:{function}", what)
    found = resolve(f"{name}:{function}", what)
    loaded = sys.modules[name]
    if slash and not str(loaded.__file__).startswith(f"{folder}/"):
        raise PluginError(
            f"The {what} names {path}, but '{name}' is {loaded.__file__}, a module that is installed or was imported "
            f"before. Rename yours, or name its file: {folder}/{name.replace('.', '/')}.py:{function}."
        )
    return found


def _import_file(file: Path, what: str) -> str:
    """Import a Python file; returns the module's name: the file's own, unless another module has it."""
    if not file.is_file():
        near = sorted(entry.name for entry in file.parent.glob("*.py"))
        raise PluginError(
            f"The {what} names the file {file}, which does not exist.{suggestion(file.name, near)} Python files in "
            f"{file.parent.absolute()}: {listing(near)}. It is looked for beside the config file, then in the working "
            "directory."
        )
    for name in (file.stem, f"{file.stem}_{xxhash.xxh3_64_hexdigest(str(file.resolve()).encode())}"):
        loaded = sys.modules.get(name)
        if loaded is not None and loaded.__file__ is not None and file.samefile(loaded.__file__):
            return name
        if loaded is None and (name != file.stem or importlib.util.find_spec(name) is None):
            break
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"The {what} cannot be imported from {file}: {type(error).__name__}: {error}.") from error
    return name


class FunctionReward:
    """Call `path` with the Answer. A plain function runs on a thread, which is abandoned when it takes too long."""

    def __init__(self, config: FunctionRewardConfig) -> None:
        self._config = config
        self._function = load_function(config.path, "reward function")
        _check_signature(self._function, config.path)

    def score(self, answer: Answer) -> float:
        """For callers without an event loop."""
        return asyncio.run(self.score_async(answer))

    async def score_async(self, answer: Answer) -> float:
        """What the function returns or raises; AttemptFailedError when it takes longer than `timeout_s`."""
        return await within(self._config.timeout_s, f"The function {self._config.path}", self._function, answer)


def _check_signature(function: Any, path: str) -> None:
    """Raise ConfigError for a function that one argument does not fit."""
    name = path.rpartition(":")[2]
    signature: inspect.Signature | None = None
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except ValueError:
        # Some functions written in C do not tell; the first call will.
        return
    except TypeError:
        problem = (
            f"is of type {type(function).__name__}, not a function"
            if signature is None
            else f"is defined as {name}{signature}, but is called with one argument"
        )
        expected = f"Write `def {name}(answer)`; answer has prompt, response, reference, row and messages."
        raise ConfigError.at(f"reward function {path}", f"{problem}. {expected}") from None
