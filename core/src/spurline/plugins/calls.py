"""Name the plugin and the hook in what hooks raise and return.

pluggy calls all implementations of a hook as one. Here each is wrapped, so that an error says whose it is, what a
wrapper of `train_step` returns is judged where it is returned, and the run knows which plugin it is called by.
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
_OF_THE_LOOP = ("step", "epoch")
"""Metrics of a step that the loop gives itself, whatever `train_step` returns."""


class HookCalls:
    """The calls of one host's hooks. All happen on the loop's thread."""

    def __init__(self) -> None:
        self._plugins: list[str] = []
        self._added: dict[str, tuple[str, float]] = {}

    @property
    def plugin(self) -> str | None:
        """Return the plugin whose hook is running, the innermost one; None outside of hooks."""
        return self._plugins[-1] if self._plugins else None

    def named(self, function: Callable[..., Any], plugin: str, hook: str, *, wrapper: bool) -> Callable[..., Any]:
        """Wrap the implementation of a hook, so that what it raises has the plugin's name."""

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
            except BaseException as error:  # noqa: BLE001 - handed on to the wrapper, as pluggy would
                raised = error
            with self._calling(function, plugin, hook, passing=raised):
                # A copy for each wrapper, so that what one changes in place is seen.
                given = dict(inner) if hook == TRAIN_STEP and inner is not None else inner
                result = _finish(wrapping, given, raised)
                if hook == TRAIN_STEP:
                    self._check_metrics(plugin, inner, result)
                return result

        return wrap if wrapper else call

    def check_recorded(self, metrics: Mapping[str, float]) -> None:
        """Raise PluginError when what a wrapper added to the step's metrics has been overwritten since."""
        added, self._added = self._added, {}
        for name, (plugin, value) in added.items():
            if metrics.get(name) != value:
                raise PluginError(
                    f"plugin '{plugin}', hook {TRAIN_STEP}: the metric '{name}' that it adds is taken: the run reports "
                    f"one of that name itself. Call it '{plugin}/{name}', say."
                )

    @contextmanager
    def _calling(
        self, function: Callable[..., Any], plugin: str, hook: str, passing: BaseException | None = None
    ) -> Generator[None]:
        """passing: an error that is not the plugin's own, but goes through its wrapper."""
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
            raise HookFailedError(
                f"{where}: {type(error).__name__}: {error} ({place_of(error, function)})", where=where
            ) from error
        finally:
            self._plugins.pop()

    def _check_metrics(self, plugin: str, inner: Mapping[str, float] | None, result: object) -> None:
        """inner: what came from inside; None when that failed and the wrapper went on all the same."""
        if not isinstance(result, Mapping):
            raise PluginError(
                f"its wrapper returned {_shown(result)} instead of the metrics of the step. End it with "
                "`return metrics`, where `metrics = yield`, or with `return {**metrics, ...}` to add some."
            )
        metrics = cast("Mapping[object, object]", result)
        before = inner or {}
        for name, value in before.items():
            if name not in metrics:
                raise PluginError(f"its wrapper left out the metric '{name}'. Return `{{**metrics, ...}}`.")
            if metrics[name] is not value and metrics[name] != value:
                raise PluginError(
                    f"its wrapper changed the metric '{name}', which was there before, from {_shown(value)} to "
                    f"{_shown(metrics[name])}. Give yours a name of its own, such as '{plugin}/{name}'."
                )
        for name, value in metrics.items():
            if name not in before:
                self._added[self._checked_name(name, plugin)] = (plugin, _checked_number(name, value))

    def _checked_name(self, name: object, plugin: str) -> str:
        if not isinstance(name, str) or not name:
            raise PluginError(
                f"its wrapper named a metric {_shown(name)}. Names are texts, such as '{plugin}/seconds'."
            )
        if name in _OF_THE_LOOP:
            raise PluginError(
                f"its wrapper gave the metric '{name}', which the loop gives itself. Call it '{plugin}/{name}', say."
            )
        return name


def _finish(wrapping: Generator[None, Any, Any], inner: object, raised: BaseException | None) -> object:
    """Return the result of a wrapper after its `yield`."""
    try:
        if raised is not None:
            wrapping.throw(raised)
        else:
            wrapping.send(inner)
    except StopIteration as end:
        return end.value
    wrapping.close()
    raise PluginError("a wrapper yields once, and this one did so again. Remove the second `yield`.")


def _checked_number(name: object, value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise PluginError(
            f"its wrapper gave the metric '{name}' the value {_shown(value)}. A metric is a finite number, such as "
            "`float(value)`; leave it out of a step that has none."
        )
    return float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def place_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the file and line of the plugin at which an error came out."""
    frames = traceback.extract_tb(error.__traceback__)
    code: Any = getattr(function, "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    place = (own or frames)[-1]
    return f"{place.filename}, line {place.lineno}"
