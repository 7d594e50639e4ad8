"""Check hookimpls before pluggy registers them: it would ignore a misspelled hook or a defaulted argument silently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from spurline import hookspecs
from spurline.errors import PluginError, listing, suggestion

REPLACEABLE_BY_CORE_ONLY = "train_step"


def hook_names() -> list[str]:
    """Every hook of `spurline.hookspecs`."""
    return [name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")]


def implemented_hooks(implementations: object) -> list[str]:
    """Names of the hooks that a module or object implements."""
    return [hook for _, hook, _ in _hookimpls(implementations)]


def check_hookimpls(implementations: object, plugin: str, *, may_replace_train_step: bool = False) -> None:
    """Raises PluginError for an unknown hook or argument, a default value, or a `train_step` that is no wrapper."""
    names = hook_names()
    for function, hook, options in _hookimpls(implementations):
        if hook not in names:
            raise PluginError(
                f"Plugin '{plugin}' implements an unknown hook '{hook}'.{suggestion(hook, names)} "
                f"Hooks: {listing(names)}."
            )
        _check_arguments(function, hook, plugin)
        is_wrapper = options.get("wrapper") or options.get("hookwrapper")
        if hook == REPLACEABLE_BY_CORE_ONLY and not is_wrapper and not may_replace_train_step:
            raise PluginError(
                f"Plugin '{plugin}' implements '{hook}', which core alone does. Wrap it: mark the function with "
                "@hookimpl(wrapper=True) and `return (yield)` inside."
            )


def _check_arguments(function: Callable[..., Any], hook: str, plugin: str) -> None:
    known = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in known:
            raise PluginError(
                f"Plugin '{plugin}': '{hook}' takes an unknown argument '{name}'.{suggestion(name, known)} "
                f"Arguments: {listing(known)}."
            )
        if parameter.default is not inspect.Parameter.empty:
            raise PluginError(
                f"Plugin '{plugin}': argument '{name}' of '{hook}' has a default value, so it would always get that "
                "value. Remove the default."
            )


def _hookimpls(implementations: object) -> Iterator[tuple[Callable[..., Any], str, Mapping[str, Any]]]:
    """(function, hook name, pluggy's options) of everything marked with `@hookimpl`."""
    for name in dir(implementations):
        value: Any = getattr(implementations, name, None)
        options = getattr(value, f"{hookspecs.PROJECT}_impl", None)
        if isinstance(options, Mapping) and inspect.isroutine(value):
            marked = cast("Mapping[str, Any]", options)
            yield value, str(marked.get("specname") or name), marked
