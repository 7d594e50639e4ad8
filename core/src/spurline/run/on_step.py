"""Functions that a program gives a run, to be called after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from spurline.errors import UserError
from spurline.plugins.hookspecs import hookimpl

OnStep = Callable[[int, Mapping[str, float]], object]
"""Gets the number of the step, from 1, and its metrics, read-only."""


class OnStepHook:
    """Calls them in order; one that has a method `close` is told of the end of the run, however it ended."""

    def __init__(self, functions: OnStep | Sequence[OnStep]) -> None:
        self._functions = list(functions) if isinstance(functions, Sequence) else [functions]
        for function in self._functions:
            if not callable(function):
                raise UserError(f"Run(on_step=...): {function!r} is no function of a step and its metrics.")

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
