"""Functions that a program gives a run, to be called after each step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from spurline.errors import UserError
from spurline.plugins.hookspecs import hookimpl

OnStep = Callable[[int, Mapping[str, float]], object]
"""Gets the number of the step, from 1, and its metrics, read-only."""


class OnStepHook:
    """Calls them in order; one that has a method `close` is told of the end of the run, however it ended."""

    def __init__(self, functions: OnStep | Sequence[OnStep]) -> None:
        """Raises UserError for what cannot be called with a step and its metrics."""
        self._functions = list(functions) if isinstance(functions, Sequence) else [functions]
        for function in self._functions:
            _check(function)

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        for function in self._functions:
            function(step, metrics)

    @hookimpl
    def on_run_end(self) -> None:
        with ExitStack() as stack:
            # Each is told, also where one before it fails.
            for function in reversed(self._functions):
                close = getattr(function, "close", None)
                if callable(close):
                    stack.callback(close)


def _check(function: object) -> None:
    fix = "Write `def on_step(step, metrics): ...`."
    if not callable(function):
        raise UserError(f"Run(on_step=...): {function!r} cannot be called. {fix}")
    try:
        inspect.signature(function).bind(1, {})
    except ValueError:
        # Some functions written in C do not tell; the first call will.
        return
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise UserError(
            f"Run(on_step=...): {name}{inspect.signature(function)} is called with a step and its metrics. {fix}"
        ) from None
