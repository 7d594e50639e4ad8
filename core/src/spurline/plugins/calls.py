"""Wrap each hook implementation, so that its errors name the plugin and the hook.

The wrapper also records which plugin's hook is running, and checks the metrics that wrappers of `train_step` return.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, cast

from spurline.errors import HookFailedError, PluginError, SpurlineError

TRAIN_STEP = "train_step"


class HookCalls:
    """The calls of one host's hooks. All calls happen on the loop's thread."""

    def __init__(self) -> None:
        self._plugins: list[str] = []

    @property
    def plugin(self) -> str | None:
        """Return the plugin whose hook is running now, or None outside of hooks."""
        return self._plugins[-1] if self._plugins else None

    def named(self, function: Callable[..., Any], plugin: str, hook: str, *, wrapper: bool) -> Callable[..., Any]:
        """Return the implementation of a hook, wrapped so that its errors name the plugin."""

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            with self._calling(function, plugin, hook):
                return function(*arguments)

        @functools.wraps(function)
        def wrap(*arguments: Any) -> Generator[None, Any, Any]:
            wrapping = function(*arguments)
            with self._calling(function, plugin, hook):
                try:
                    next(wrapping)
                except StopIteration:
                    raise PluginError("a wrapper yields once, and this one did not. Write `result = yield`.") from None
            inner, raised = None, None
            try:
                inner = yield
            except BaseException as error:  # noqa: BLE001 - the wrapper gets it
                raised = error
            with self._calling(function, plugin, hook, passing=raised):
                # Each wrapper gets a copy, so that a change of the metrics in place is noticed.
                given = dict(inner) if hook == TRAIN_STEP and inner is not None else inner
                result = _finish(wrapping, given, raised)
                if hook == TRAIN_STEP:
                    _check_metrics(plugin, inner, result)
                return result

        return wrap if wrapper else call

    @contextmanager
    def _calling(
        self, function: Callable[..., Any], plugin: str, hook: str, passing: BaseException | None = None
    ) -> Generator[None]:
        """Name the plugin in errors. The error `passing` stays as it is, since another plugin or core has raised it."""
        self._plugins.append(plugin)
        try:
            yield
        except Exception as error:
            if error is passing:
                raise
            where = f"plugin '{plugin}', hook {hook}"
            if isinstance(error, SpurlineError):
                error.say_where(where)
                raise
            failure = HookFailedError(f"{type(error).__name__}: {error} ({place_of(error, function)})")
            failure.say_where(where)
            raise failure from error
        finally:
            self._plugins.pop()


def _finish(wrapping: Generator[None, Any, Any], inner: object, raised: BaseException | None) -> object:
    try:
        if raised is not None:
            wrapping.throw(raised)
        else:
            wrapping.send(inner)
    except StopIteration as end:
        return end.value
    wrapping.close()
    raise PluginError("a wrapper yields once, but this one yielded twice. Remove the second `yield`.")


def _check_metrics(plugin: str, inner: Mapping[str, float] | None, result: object) -> None:
    """Raise PluginError unless `result` keeps all metrics of `inner` unchanged and adds only finite numbers."""
    if not isinstance(result, Mapping):
        raise PluginError(
            f"its wrapper returned {result!r:.60} instead of the metrics of the step. End it with `return metrics`, "
            "where `metrics = yield`, or with `return {**metrics, ...}` to add some."
        )
    metrics, before = cast("Mapping[object, object]", result), inner or {}
    for name, value in before.items():
        if name not in metrics or (metrics[name] is not value and metrics[name] != value):
            raise PluginError(
                f"its wrapper changed or left out the metric '{name}'. Return `{{**metrics, ...}}`, and "
                f"give yours names such as '{plugin}/{name}'."
            )
    for name, value in metrics.items():
        is_finite = isinstance(value, Real) and math.isfinite(value)
        if name not in before and not (isinstance(name, str) and is_finite):
            raise PluginError(
                f"its wrapper gave the metric {name!r} the value {value!r:.60}. Metrics are finite numbers."
            )


def place_of(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return the last file and line in the traceback of an error, in the file of `function` if it occurs there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    code: Any = getattr(function, "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    place = (own or frames)[-1]
    return f"{place.filename}, line {place.lineno}"
