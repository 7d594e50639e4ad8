"""Hooks of plugins: what is refused, and the order in which the rest is called."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from types import ModuleType
from typing import Any

import pytest
from fake_plugins import FakePlugins, refused

from spurline.errors import PluginError
from spurline.plugins.hookspecs import hookimpl, hookspec
from spurline.plugins.host import PluginHost


def recorder(log: list[str], name: str) -> Callable[..., None]:
    def on_step_end(step: int) -> None:
        log.append(f"{name} {step}")

    return on_step_end


def misspelled(step: int) -> None: ...


def unknown_argument(step: int, metric: Mapping[str, float]) -> None: ...


def default_argument(step: int = 7) -> None: ...


def replacing(step: int) -> dict[str, float]:
    return {}


@pytest.mark.parametrize(
    ("name", "function", "told"),
    [
        ("on_step_ended", misspelled, "an unknown hook 'on_step_ended'. Did you mean 'on_step_end'?"),
        ("on_step_end", unknown_argument, "an unknown argument 'metric'. Did you mean 'metrics'?"),
        ("on_step_end", default_argument, "argument 'step' of 'on_step_end' has a default"),
        ("train_step", replacing, "Plugin 'wrong' implements 'train_step', but only core may. Wrap it"),
    ],
)
def test_a_wrong_hook_is_refused_with_the_fix(
    plugins: FakePlugins, name: str, function: Callable[..., Any], told: str
) -> None:
    refused(["wrong"], plugins.add("wrong", **{name: hookimpl(specname=name)(function)}), told)


def wrapping(log: list[str], name: str) -> Callable[..., Any]:
    @hookimpl(wrapper=True)
    def train_step(step: int) -> Generator[None, dict[str, float], dict[str, float]]:
        log.append(f"{name} before")
        metrics = yield
        log.append(f"{name} after")
        return {**metrics, name: float(step)}

    return train_step


class Core:
    @hookimpl
    def train_step(self) -> dict[str, float]:
        return {"loss": 1.0}


def test_wrappers_nest_in_list_order_around_cores_update(plugins: FakePlugins) -> None:
    log: list[str] = []
    available = plugins.add("inner", train_step=wrapping(log, "inner"))
    plugins.add("outer", train_step=wrapping(log, "outer"))
    host = PluginHost.load(["outer", "inner"], available)
    host.attach(Core(), "core/update")
    assert host.hooks.train_step(step=2, batch=None) == {"loss": 1.0, "inner": 2.0, "outer": 2.0}
    assert log == ["outer before", "inner before", "inner after", "outer after"]


def test_list_order_is_call_order(plugins: FakePlugins) -> None:
    log: list[str] = []
    for name in ("a", "b", "c"):
        plugins.add(name, hooks=(recorder(log, name),))
    for names in (["b", "a", "c"], ["c", "b", "a"]):
        log.clear()
        PluginHost.load(names, plugins.available).hooks.on_step_end(step=4, metrics={})
        assert log == [f"{name} 4" for name in names]


def test_attached_object_is_called_before_the_plugins_and_checked_like_them(plugins: FakePlugins) -> None:
    log: list[str] = []

    class Watch:
        @hookimpl
        def on_step_end(self, step: int) -> None:
            log.append("attached")

    class Typo:
        @hookimpl
        def on_step_begin(self) -> None: ...

    host = PluginHost.load(["a"], plugins.add("a", hooks=(recorder(log, "a"),)))
    host.attach(Watch(), "watch")
    host.hooks.on_step_end(step=1, metrics={})
    assert log == ["attached", "a 1"]
    with pytest.raises(PluginError, match="'typo' implements an unknown hook 'on_step_begin'"):
        host.attach(Typo(), "typo")


def hookspecs_of(*functions: Callable[..., None]) -> ModuleType:
    module = ModuleType("hookspecs_of_a_plugin")
    vars(module).update({function.__name__: hookspec(function) for function in functions})
    return module


def on_draft(step: int) -> None:
    """Called after a draft."""


def test_a_plugin_opens_a_hook_that_one_before_it_implements(plugins: FakePlugins) -> None:
    told: list[int] = []

    def listen(step: int) -> None:
        told.append(step)

    listen.__name__ = "on_draft"
    plugins.add("early", hooks=(listen,))
    plugins.add("late", register=lambda registry: registry.add_hookspecs(hookspecs_of(on_draft)))
    PluginHost.load(["early", "late"], plugins.available).hooks.on_draft(step=3)
    assert told == [3]
    refused(["early"], plugins.available, "'early' implements an unknown hook 'on_draft'")


def test_a_hook_of_a_plugin_that_is_left_out_may_be_marked_as_optional(plugins: FakePlugins) -> None:
    plugins.add("early", on_draft=hookimpl(on_draft, optionalhook=True))
    assert "early" in PluginHost.load(["early"], plugins.available).plugins
