"""Finding, checking, ordering and loading plugins."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from bare_components import BARE
from fake_plugins import FakePlugins, of_kind, refused

from spurline import load_config
from spurline.config.section import ComponentConfig
from spurline.data.configs import PackedCollatorConfig
from spurline.errors import ConfigError, PluginError
from spurline.plugins import hookimpl
from spurline.plugins.host import InstalledPlugin, Plugin, PluginHost, installed_commands, installed_plugins
from spurline.plugins.official import install_command
from spurline.plugins.registry import ComponentRegistrar

SETTINGS = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 3}


class FastConfig(ComponentConfig):
    name: str = "fast"
    speed: int = 3
    """How fast."""


def offer(kind: str, name: str, **flags: bool) -> Callable[[ComponentRegistrar], None]:
    def register(registry: ComponentRegistrar) -> None:
        registry.add(of_kind(FastConfig, kind), "fake_module:Fast", name=name, **flags)

    return register


def test_missing_plugin_lists_what_is_installed_and_a_near_miss(plugins: FakePlugins) -> None:
    available = plugins.add("collation_fast")
    refused(
        ["colation_fast"],
        available,
        "Plugin 'colation_fast' is not installed. Did you mean 'collation_fast'? Installed: collation_fast.",
    )


def test_plugin_for_another_interface_says_what_to_upgrade(plugins: FakePlugins) -> None:
    available = plugins.add("newer", api=99)
    plugins.add("older", api=0)
    refused(["newer"], available, "was written for plugin interface 99, this spurline has 2. Upgrade spurline.")
    refused(["older"], available, "was written for plugin interface 0, this spurline has 2. Upgrade the plugin.")


def test_required_plugin_must_be_listed_too(plugins: FakePlugins) -> None:
    available = plugins.add("base")
    plugins.add("extra", requires=("base",))
    refused(["extra"], available, "Plugin 'extra' requires 'base'. Add it to the list: plugins: [base, extra].")
    assert list(PluginHost.load(["extra", "base"], available).plugins) == ["core", "extra", "base"]


def test_module_without_a_declaration_or_with_another_name_is_told_so(plugins: FakePlugins) -> None:
    refused(["bare"], plugins.add("bare", PLUGIN=None), "defines no `PLUGIN = Plugin(name, api=2, ...)`")
    available = plugins.add("left", PLUGIN=Plugin("right", api=2))
    refused(["left"], available, "declares the name 'right'; entry point and PLUGIN must agree")


def test_plugin_that_cannot_be_imported_names_distribution_and_cause() -> None:
    available = {"broken": InstalledPlugin("broken", "no_such_module_at_all", "spurline-broken", "0.3")}
    refused(["broken"], available, "Plugin 'broken' (spurline-broken 0.3, module no_such_module_at_all) cannot be")


def test_an_error_in_register_components_has_the_plugins_file_and_line(plugins: FakePlugins) -> None:
    @hookimpl
    def fails(registry: ComponentRegistrar) -> None:
        raise KeyError("oops")

    @hookimpl
    def misuses(registry: ComponentRegistrar) -> None:
        registry.add(of_kind(FastConfig, "loss"), "no_attribute")

    for function, message in ((fails, "KeyError: 'oops'"), (misuses, "is malformed")):
        available = plugins.add("clumsy", register_components=function)
        last = function.__code__.co_firstlineno + 2
        with pytest.raises(PluginError, match=rf"(?s){message}.* \(.*test_plugins\.py, line {last}\)$"):
            PluginHost.load(["clumsy"], available)


def test_the_name_of_a_package_in_the_place_of_its_plugin_is_told_the_plugin(plugins: FakePlugins) -> None:
    refused(["spurline-meter"], plugins.add("meter"), "Did you mean 'meter'?")


def test_a_missing_plugin_of_this_project_is_installed_from_the_checkout_that_core_is_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs = {"async_rl": ["numpy", "spurline-rl~=0.1"], "rl": ["spurline-models"], "models": ["spurline-text-kit"]}
    for name, needed in (needs | {"text_kit": []}).items():
        (folder := tmp_path / "plugins" / name).mkdir(parents=True)
        (folder / "pyproject.toml").write_text(f"[project]\ndependencies = {['spurline~=0.1', *needed]}\n")
    installed = [importlib.metadata.EntryPoint("rl", "spurline_rl", "spurline.plugins")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: installed)
    folders = " ".join(f"{tmp_path}/plugins/{name}" for name in ("async_rl", "models", "text_kit"))
    for origin, package in (
        ({"url": f"{tmp_path.as_uri()}/core", "dir_info": {}}, folders),
        ({"url": f"{tmp_path.as_uri()}/gone/core", "dir_info": {}}, "spurline-async-rl"),
        (None, "spurline-async-rl"),
    ):
        text = None if origin is None else json.dumps(origin)
        monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", lambda _, name, text=text: text)
        assert install_command("async_rl") == f"pip install {package}"


def test_a_component_that_an_unlisted_plugin_declares_in_its_metadata_is_named_with_the_plugin(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {
        "spurline.plugins": [("models", BARE.module), ("waves", "this_import_would_fail")],
        "spurline.components": [("loss/tide", "this_import_would_fail"), ("section/moon", "this_import_would_fail")],
    }

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [importlib.metadata.EntryPoint(*entry, group) for entry in entries.get(group, [])]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    with pytest.raises(ConfigError) as caught:
        load_config({**SETTINGS, "loss": "tide", "moon": {"phase": 1}})
    listed = "list it under plugins: [waves]."
    assert f"loss is 'tide', which the plugin 'waves' has: {listed}" in str(caught.value)
    assert f"moon is a section of the plugin 'waves', which is not enabled: {listed}" in str(caught.value)


def test_unlisted_plugin_is_never_imported(plugins: FakePlugins) -> None:
    available = plugins.add("listed")
    available["unlisted"] = InstalledPlugin("unlisted", "this_import_would_fail", "spurline-unlisted", "1")
    assert "unlisted" not in PluginHost.load(["listed"], available).plugins
    assert "this_import_would_fail" not in sys.modules


@pytest.mark.parametrize(
    ("listed", "loaded"),
    [
        ([], ["models", "trackers"]),
        (["mine"], ["models", "trackers", "mine"]),
        (["-trackers", "mine"], ["models", "mine"]),
        (["mine", "models"], ["trackers", "mine", "models"]),
        (["-trackers", "mine", "-rl"], ["models", "mine"]),
        (["-rl"], ["models", "trackers"]),
    ],
)
def test_default_plugins_that_are_installed_come_first_unless_they_are_left_out(
    plugins: FakePlugins, listed: list[str], loaded: list[str]
) -> None:
    for name in ("trackers", "mine"):
        plugins.add(name)
    available = {**plugins.available, "models": BARE}
    config = load_config({**SETTINGS, "plugins": listed}, available=available)
    mine = [name for name in config.host.plugins if name in available]
    assert mine == loaded
    assert config.config.plugins == tuple(listed)


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (["-mine"], "'-mine' leaves out a plugin that is not loaded by default"),
        (["-tracker"], "Did you mean 'trackers'?"),
        (["-models", "models"], "'models' and '-models' are both listed"),
    ],
)
def test_only_a_default_plugin_is_left_out(plugins: FakePlugins, listed: list[str], told: str) -> None:
    for name in ("models", "mine"):
        plugins.add(name)
    refused(listed, plugins.available, told)


def test_what_a_plugin_replaces_may_be_of_one_that_is_listed_after_it(plugins: FakePlugins) -> None:
    plugins.add("models", register=offer("optimizer", "steady"))
    plugins.add("turbo", register=offer("optimizer", "steady", replaces_builtin=True))
    registry = PluginHost.load(["turbo", "models"], plugins.available).registry
    assert registry.get("optimizer", "steady").plugin == "turbo"
    assert registry.get("optimizer", "models/steady").plugin == "models"


def fail(registry: ComponentRegistrar) -> None:
    raise KeyError("oops")


def test_the_error_of_a_default_plugin_says_how_to_do_without_it(plugins: FakePlugins) -> None:
    how = "To do without it, set plugins: [-rl]."
    refused([], {"rl": InstalledPlugin("rl", "no_such_module_at_all", "spurline-rl", "1")}, how)
    refused([], plugins.add("rl", api=99), how)
    refused([], plugins.add("rl", register=fail), how)
    refused([], plugins.add("rl", register=offer("optimizer", "x", replaces_builtin=True)), how)
    assert "rl" not in PluginHost.load(["-rl"], plugins.available).plugins


def test_two_plugins_claiming_one_name_are_an_error_naming_both_distributions(plugins: FakePlugins) -> None:
    plugins.add("one", register=offer("loss", "fast"))
    plugins.add("two", register=offer("loss", "fast"))
    refused(["one", "two"], plugins.available, "claim loss 'fast': spurline-one (plugin 'one') and spurline-two")
    assert "fast" in PluginHost.load(["two"], plugins.available).registry.names("loss")


def test_replaced_builtin_stays_reachable_under_its_core_name(bare: None, plugins: FakePlugins) -> None:
    available = plugins.add("turbo", register=offer("collator", "packed", replaces_builtin=True))
    settings = {**SETTINGS, "plugins": ["turbo"]}
    replaced = load_config({**settings, "collator": {"name": "packed", "speed": 9}}, available=available)
    assert replaced.resolved()["collator"] == {"name": "packed", "speed": 9}
    original = load_config({**settings, "collator": "core/packed"}, available=available)
    assert isinstance(original.config.collator, PackedCollatorConfig)
    assert replaced.host.registry.get("collator", "core/packed").plugin == "core"


def test_default_order_of_a_plugin_holds_although_code_that_makes_sections_has_one_too(
    bare: None, plugins: FakePlugins
) -> None:
    available = plugins.add("turbo", register=offer("order", "fast", default=True))
    assert load_config({**SETTINGS, "plugins": ["turbo"]}, available=available).config.data.order.name == "fast"
    assert load_config(SETTINGS).config.data.order.name == "uniform"


def test_default_of_a_plugin_holds_while_it_is_enabled(bare: None, plugins: FakePlugins) -> None:
    available = plugins.add("turbo", register=offer("prefetch", "fast", default=True))
    assert load_config({**SETTINGS, "plugins": ["turbo"]}, available=available).resolved()["prefetch"]["name"] == "fast"
    assert load_config(SETTINGS, available=available).resolved()["prefetch"]["name"] == "serial"


class FakeDistribution:
    def __init__(self, name: str) -> None:
        self.name, self.version = name, "1"


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    """Make metadata show entry points (name, distribution)."""
    found = [
        importlib.metadata.EntryPoint(name, "some_module", "group")._for(FakeDistribution(distribution))  # type: ignore[attr-defined]
        for name, distribution in entries
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)


@pytest.mark.parametrize("find", [installed_plugins, installed_commands])
def test_two_distributions_with_one_plugin_or_command_name_are_an_error(
    monkeypatch: pytest.MonkeyPatch, find: Callable[[], Mapping[str, Any]]
) -> None:
    install(monkeypatch, ("same", "dist-a"), ("same", "dist-b"))
    with pytest.raises(PluginError, match=r"'same': dist-a and dist-b\. Uninstall one: pip uninstall dist-b\."):
        find()


def test_installed_plugins_are_read_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("a", "dist-a"), ("a", "dist-a"), ("b", "dist-b"))
    assert installed_plugins() == {
        "a": InstalledPlugin("a", "some_module", "dist-a", "1"),
        "b": InstalledPlugin("b", "some_module", "dist-b", "1"),
    }
