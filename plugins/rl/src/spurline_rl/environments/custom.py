"""Environment `custom`: a class, an object with `run`, or an async function. It needs no plugin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import PluginError
from spurline.plugins.registry import Registry
from spurline_concurrency.calls import is_async
from spurline_rl.environments.configs import CustomConfig
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import Environment


def make_custom(
    config: CustomConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> Environment:
    """Return the environment that `config.path` names. Raises PluginError if it cannot be found, built or run."""
    given: Any = load_function(config.path, "environment")
    made: Any = given
    if not inspect.isclass(given) and is_async(given):
        made = SimpleNamespace(run=given)
    elif inspect.isclass(given) or not hasattr(given, "run"):
        build = cast("Callable[..., Any]", given)
        _check_call(config.path, build, (config,), registry=registry, tokenizer=tokenizer, data=data)
        made = build(config, registry=registry, tokenizer=tokenizer, data=data)
    if not hasattr(made, "run") or not is_async(made.run):
        raise PluginError(
            f"The environment {config.path} makes a {type(made).__name__}, which has no `async def run(task, policy)`."
        )
    _check_call(config.path, made.run, ("task", "policy"))
    return cast("Environment", made)


def _check_call(path: str, function: Callable[..., Any], arguments: tuple[Any, ...], **named: Any) -> None:
    # Partial functions and callable objects have no `__name__`.
    shown = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
        shown += str(signature)
        signature.bind(*arguments, **named)
    except (TypeError, ValueError) as error:
        wanted = "(task, policy)" if not named else "(config, registry, tokenizer, data)"
        raise PluginError(
            f"The environment {path} is defined as {shown} ({error}), but is called with {wanted}. Write an async "
            "function with a task and a policy, or a class that has `run`."
        ) from error
