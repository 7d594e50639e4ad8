"""What hooks raise and return carries the plugin's name, and the metrics of a step stay what they were."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from fake_plugins import FakePlugins

from spurline.errors import HookFailedError, ModelError, NonFiniteLossError, PluginError
from spurline.plugins import hookimpl
from spurline.plugins.host import PluginHost

CORE_METRICS = {"loss": 1.5, "lr": 0.1}


class Core:
    """Stands for core's update. error: what it raises instead of returning metrics."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    @hookimpl
    def train_step(self) -> dict[str, float]:
        if self._error is not None:
            raise self._error
        return dict(CORE_METRICS)


def wrapping(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A wrapper of `train_step` that returns what `change` makes of the metrics."""

    @hookimpl(wrapper=True)
    def train_step() -> Generator[None, Any, Any]:
        return change((yield))

    return train_step


def host_of(plugins: FakePlugins, *names: str, core: object | None = None, **attributes: Any) -> PluginHost:
    for name in names:
        plugins.add(name, **attributes)
    host = PluginHost.load(list(names), plugins.available)
    host.attach(core or Core(), "core/update")
    return host


def step(host: PluginHost) -> Mapping[str, float]:
    return host.hooks.train_step(step=1, batch=None)


def test_an_error_of_a_hook_names_plugin_hook_and_place_and_keeps_its_cause(plugins: FakePlugins) -> None:
    def on_step_end(step: int) -> None:
        raise ValueError("out of ideas")

    host = PluginHost.load(["clumsy"], plugins.add("clumsy", hooks=(on_step_end,)))
    with pytest.raises(
        HookFailedError, match=r"^plugin 'clumsy', hook on_step_end: ValueError: out of ideas"
    ) as raised:
        host.hooks.on_step_end(step=3, metrics={})
    assert isinstance(raised.value.__cause__, ValueError)
    assert f"{__file__}, line" in str(raised.value)
    assert raised.value.exit_code == 1


def test_a_users_mistake_found_by_a_hook_keeps_its_class_and_exit_code(plugins: FakePlugins) -> None:
    def on_step_end(step: int) -> None:
        raise ModelError("no such layer")

    host = PluginHost.load(["strict"], plugins.add("strict", hooks=(on_step_end,)))
    with pytest.raises(ModelError, match=r"^plugin 'strict', hook on_step_end: no such layer$") as raised:
        host.hooks.on_step_end(step=3, metrics={})
    assert raised.value.exit_code == 2


def test_an_attached_objects_errors_are_those_of_the_plugin_that_attached_it(plugins: FakePlugins) -> None:
    class Watch:
        @hookimpl
        def on_step_end(self) -> None:
            raise KeyError("gone")

    def on_run_start(run: PluginHost) -> None:
        run.attach(Watch(), "a name of its own")

    host = PluginHost.load(["owner"], plugins.add("owner", hooks=(on_run_start,)))
    host.hooks.on_run_start(run=host)
    with pytest.raises(HookFailedError, match=r"^plugin 'owner', hook on_step_end: KeyError"):
        host.hooks.on_step_end(step=1, metrics={})
    assert host.calls.plugin is None


def test_an_error_of_the_update_passes_through_wrappers_as_it_is(plugins: FakePlugins) -> None:
    host = host_of(plugins, "outer", "inner", core=Core(NonFiniteLossError("loss is nan")), train_step=wrapping(dict))
    with pytest.raises(NonFiniteLossError, match=r"^loss is nan$"):
        step(host)
    assert host.calls.plugin is None


def test_an_error_of_the_inner_wrapper_is_not_laid_to_the_outer_one(plugins: FakePlugins) -> None:
    @hookimpl(wrapper=True)
    def train_step() -> Generator[None, Any, Any]:
        raise ValueError("before the update")
        yield

    plugins.add("outer", train_step=wrapping(dict))
    host = PluginHost.load(["outer", "inner"], plugins.add("inner", train_step=train_step))
    host.attach(Core(), "core/update")
    with pytest.raises(HookFailedError, match=r"^plugin 'inner', hook train_step: ValueError: before the update"):
        step(host)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metrics: None, "returned None instead of the metrics"),
        (lambda metrics: {**metrics, "loss": 0.0}, "changed or left out the metric 'loss'"),
        (lambda metrics: metrics.update(loss=0.0) or metrics, "changed or left out the metric 'loss'"),
        (lambda metrics: {"loss": metrics["loss"]}, "changed or left out the metric 'lr'"),
        (lambda metrics: {**metrics, "note": "fine"}, "metric 'note' the value 'fine'"),
        (lambda metrics: {**metrics, "norm": torch.ones(())}, "metric 'norm' the value tensor"),
        (lambda metrics: {**metrics, "norm": float("nan")}, "metric 'norm' the value nan"),
        (lambda metrics: {**metrics, 7: 1.0}, "metric 7 the value 1.0"),
    ],
)
def test_a_wrapper_that_returns_no_metrics_or_changes_them_is_refused(
    plugins: FakePlugins, change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message) as raised:
        step(host_of(plugins, "mine", train_step=wrapping(change)))
    assert str(raised.value).startswith("plugin 'mine', hook train_step: its wrapper ")


def test_wrappers_may_add_numbers_and_hand_on_what_was_there(plugins: FakePlugins) -> None:
    host = host_of(plugins, "mine", train_step=wrapping(lambda metrics: {**metrics, "a": 1, "b": np.float32(0.5)}))
    assert step(host) == {**CORE_METRICS, "a": 1, "b": 0.5}


def test_a_wrapper_that_yields_never_or_twice_is_told_so(plugins: FakePlugins) -> None:
    @hookimpl(wrapper=True, specname="train_step")
    def never() -> Generator[None, Any, Any]:
        if False:
            yield

    @hookimpl(wrapper=True, specname="train_step")
    def twice() -> Generator[None, Any, Any]:
        yield
        yield

    for name, function, message in (("lazy", never, "this one did not"), ("eager", twice, "yielded twice")):
        with pytest.raises(PluginError, match=f"plugin '{name}', hook train_step: a wrapper yields once, .*{message}"):
            step(host_of(plugins, name, train_step=function))


def test_a_name_that_is_attached_already_is_refused_until_it_is_detached() -> None:
    class Watch:
        @hookimpl
        def on_step_end(self) -> None: ...

    host = PluginHost.load([])
    host.attach(Watch(), "watch")
    with pytest.raises(PluginError, match="'watch' is attached already"):
        host.attach(Watch(), "watch")
    with host.attachments():
        host.attach(Watch(), "of a run")
    host.attach(Watch(), "of a run")
    host.detach("watch")
    host.attach(Watch(), "watch")
