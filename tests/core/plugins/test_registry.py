"""The registry: names, aliases, defaults, and factories that resolve when first needed."""

from __future__ import annotations

import inspect
from typing import ClassVar

import pytest
from fake_plugins import KINDS, of_kind

from spurline.config.section import ComponentConfig
from spurline.errors import PluginError
from spurline.plugins.registry import CORE, ComponentRegistrar, Registry, resolve


class Config(ComponentConfig):
    name: str = "any"


class Made:
    """What the factories of these tests build."""

    def __init__(self, config: ComponentConfig, **dependencies: object) -> None:
        self.config, self.dependencies = config, dependencies


FACTORY = f"{__name__}:Made"


@pytest.fixture
def registry() -> Registry:
    """Core offers the collators `padded` and `packed`, the latter by default."""
    filled = Registry()
    filled.kinds |= KINDS
    core = ComponentRegistrar(filled, CORE, "spurline")
    core.add(of_kind(Config, "collator"), FACTORY, name="padded")
    core.add(of_kind(Config, "collator"), FACTORY, name="packed", default=True)
    return filled


def plugin(registry: Registry, name: str = "fast") -> ComponentRegistrar:
    return ComponentRegistrar(registry, name, f"spurline-{name}")


def test_component_is_built_with_its_config_and_dependencies(registry: Registry) -> None:
    config = Config(name="packed")
    made = registry.create("collator", config, pad_token_id=3)
    assert isinstance(made, Made)
    assert made.config is config
    assert made.dependencies == {"pad_token_id": 3}


def test_factory_is_resolved_only_when_the_component_is_built(registry: Registry) -> None:
    plugin(registry).add(of_kind(Config, "loss"), "no_such_module:Class", name="late")
    assert registry.get("loss", "late").factory == "no_such_module:Class"
    with pytest.raises(PluginError, match="loss 'late' of spurline-fast cannot be imported from"):
        registry.create("loss", Config(name="late"))


def test_factory_without_the_named_attribute_says_so() -> None:
    with pytest.raises(PluginError, match="names 'json:Nothing', but json has no 'Nothing'"):
        resolve("json:Nothing", "loss 'x'")


@pytest.mark.parametrize("factory", ["module.Class", "a:b:c"])
def test_malformed_factory_is_refused(registry: Registry, factory: str) -> None:
    with pytest.raises(PluginError, match="Write the factory as 'module:Class'"):
        plugin(registry).add(of_kind(Config, "loss"), factory, name="x")


def test_a_config_without_a_kind_is_refused_with_the_base_class_to_take(registry: Registry) -> None:
    with pytest.raises(PluginError, match=r"registry.add\(Config, .* has no kind.*import LossConfig"):
        plugin(registry).add(Config, FACTORY)


def test_unknown_kind_gets_a_near_miss(registry: Registry) -> None:
    registrar = plugin(registry)
    registrar.add(of_kind(Config, "colator"), FACTORY, name="x")
    with pytest.raises(PluginError, match=r"spurline-fast registers 'x' under the unknown kind 'colator'\. Did"):
        registrar.finish()


class StyleConfig(ComponentConfig):
    kind: ClassVar[str] = "style"


class PlainConfig(StyleConfig):
    name: str = "plain"


def test_a_plugin_opens_a_kind_that_one_before_it_adds_to(registry: Registry) -> None:
    early, late = plugin(registry, "early"), plugin(registry, "late")
    early.add(PlainConfig, FACTORY, default=True)
    late.add_kind(StyleConfig, f"{__name__}:Made")
    early.finish()
    assert registry.default("style") == "plain"
    assert isinstance(registry.create("style", PlainConfig()), Made)


def test_two_plugins_cannot_open_one_kind(registry: Registry) -> None:
    plugin(registry, "fast").add_kind(StyleConfig, f"{__name__}:Made")
    with pytest.raises(PluginError, match=r"the kind 'style': spurline-fast .* and spurline-quick"):
        plugin(registry, "quick").add_kind(StyleConfig, f"{__name__}:Made")


@pytest.mark.parametrize(
    ("config", "protocol", "told"),
    [(Config, "module:Class", "names no kind.*kind: ClassVar"), (StyleConfig, "module.Class", "'module:Class'")],
)
def test_a_kind_has_a_name_and_a_protocol(
    registry: Registry, config: type[ComponentConfig], protocol: str, told: str
) -> None:
    with pytest.raises(PluginError, match=told):
        plugin(registry).add_kind(config, protocol)


def test_unknown_name_gets_a_near_miss(registry: Registry) -> None:
    with pytest.raises(PluginError, match=r"No collator is named 'pakced'\. Did you mean 'packed'\? Available: packed"):
        registry.get("collator", "pakced")


def test_taking_a_builtin_name_must_be_said_aloud(registry: Registry) -> None:
    with pytest.raises(PluginError, match="pass replaces_builtin=True"):
        plugin(registry).add(of_kind(Config, "collator"), FACTORY, name="packed")


def test_builtin_can_be_replaced_by_one_plugin_only(registry: Registry) -> None:
    plugin(registry).add(of_kind(Config, "collator"), FACTORY, name="packed", replaces_builtin=True)
    with pytest.raises(PluginError, match=r"spurline-fast \(plugin 'fast'\) and spurline-quick \(plugin 'quick'\)"):
        plugin(registry, "quick").add(of_kind(Config, "collator"), FACTORY, name="packed", replaces_builtin=True)


def test_replacing_what_core_does_not_have_is_an_error(registry: Registry) -> None:
    fast = plugin(registry)
    fast.add(of_kind(Config, "collator"), FACTORY, name="pakced", replaces_builtin=True)
    with pytest.raises(PluginError, match=r"no collator has that name\. Did you mean 'packed'\?"):
        fast.finish()


def test_one_plugin_registering_a_name_twice_is_an_error(registry: Registry) -> None:
    fast = plugin(registry)
    fast.add(of_kind(Config, "loss"), FACTORY, name="x")
    with pytest.raises(PluginError, match="spurline-fast registers loss 'x' twice"):
        fast.add(of_kind(Config, "loss"), FACTORY, name="x")


@pytest.mark.parametrize("second", ["fast", "quick"])
def test_a_kind_has_one_default(registry: Registry, second: str) -> None:
    plugin(registry).add(of_kind(Config, "collator"), FACTORY, name="one", default=True)
    with pytest.raises(
        PluginError, match=rf"default collator: spurline-fast \('one'\) and spurline-{second} \('two'\)"
    ):
        plugin(registry, second).add(of_kind(Config, "collator"), FACTORY, name="two", default=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_a_protocol_or_abstract_base_with_a_docstring(kind: str) -> None:
    protocol = resolve(KINDS[kind].protocol, f"protocol of {kind}")
    assert getattr(protocol, "_is_protocol", False) or inspect.isabstract(protocol)
    assert "Factory:" in (protocol.__doc__ or "")
