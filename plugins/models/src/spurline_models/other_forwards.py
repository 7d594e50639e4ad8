"""Give single modules of a model another forward function, and the model its own ones back for a while.

Its classes, and other models of the same classes, compute as before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

_OWN = "_spurline_own_forward"
"""Attribute of a module with another forward: who gave it, and the module's own."""


def give_forward(module: nn.Module, forward: Callable[..., Any], by: str) -> None:
    """Let the module compute by this function. `by` is the giver's name, for `giving_back`."""
    note_own_forward(module, type(module).forward, by)
    vars(module)["forward"] = MethodType(forward, module)


def note_own_forward(module: nn.Module, own: Callable[..., Any], by: str) -> None:
    """Note the own forward function of a module whose class computes otherwise."""
    vars(module)[_OWN] = (by, own)


def changed_by(causal: nn.Module, by: str) -> list[nn.Module]:
    """Return the modules that were given a forward function by `by`."""
    return [module for module in causal.modules() if vars(module).get(_OWN, ("",))[0] == by]


@contextmanager
def giving_back(causal: nn.Module, by: Collection[str]) -> Iterator[None]:
    """Let modules that were given a function by one of `by` compute by their own in the context."""
    changed = [module for one in by for module in changed_by(causal, one)]
    given = [vars(module).get("forward") for module in changed]
    for module in changed:
        vars(module)["forward"] = MethodType(vars(module)[_OWN][1], module)
    try:
        yield
    finally:
        for module, forward in zip(changed, given, strict=True):
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
