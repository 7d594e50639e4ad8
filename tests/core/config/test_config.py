"""Loading a config: file formats, defaults, shorthands, plugin sections, the JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from fake_plugins import FakePlugins, of_kind
from pydantic import ValidationError

from spurline import load_config
from spurline.config.document import read_document
from spurline.config.loading import config_model
from spurline.config.section import Component, ComponentConfig, Section
from spurline.errors import ConfigError, PluginError
from spurline.plugins.host import PluginHost

pytestmark = pytest.mark.usefixtures("bare")

MINIMAL = "model: {path: m}\ndata: {train: rows.jsonl}\nsteps: 3\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_anchors_aliases_and_merges_are_read(write: Callable[..., Path]) -> None:
    document = read_document(write("base: &base {rate: 1e-5, names: &names [a, b]}\nnext: {<<: *base, more: *names}\n"))
    assert document.values["next"] == {"more": ["a", "b"], "rate": 1e-5, "names": ["a", "b"]}
    assert document.lines["next.more"] == 2


def test_numbers_without_a_dot_are_floats_as_in_yaml_1_2(write: Callable[..., Path]) -> None:
    config = load_config(write(MINIMAL + "optimizer: {learning_rate: 1e-5}\nrun_dir: on\n")).config
    assert config.optimizer.learning_rate == 1e-5
    assert config.run_dir == Path("on")


def test_toml_is_read_by_suffix_and_means_the_same(write: Callable[..., Path]) -> None:
    toml = 'steps = 3\n[model]\npath = "m"\n[data]\ntrain = "rows.jsonl"\n[optimizer]\nlearning_rate = 1e-5\n'
    yaml = MINIMAL + "optimizer: {learning_rate: 1e-5}\n"
    assert load_config(write(toml, "run.toml")).resolved() == load_config(write(yaml)).resolved()


def test_a_mapping_is_accepted_and_left_untouched() -> None:
    given: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": ["a.jsonl"]}, "steps": 3, "plugins": ()}
    before = json.dumps(given)
    config = load_config(given, ["model.path=other", "data.train.0.split=test"]).config
    assert config.model.path == "other"
    assert json.dumps(given) == before


def test_resolved_settings_load_to_themselves(write: Callable[..., Path]) -> None:
    resolved = load_config(write(MINIMAL)).resolved()
    assert load_config(json.loads(json.dumps(resolved))).resolved() == resolved


def test_a_retired_setting_is_passed_over_in_the_record_of_a_run_alone(write: Callable[..., Path]) -> None:
    settings = load_config(write(MINIMAL)).resolved()
    settings["checkpoint"]["verify"] = "full"
    assert not hasattr(load_config(settings, recorded=True).config.checkpoint, "verify")
    with pytest.raises(ConfigError, match=r"checkpoint\.verify is not a setting"):
        load_config(settings)


def test_values_cannot_change_after_loading(write: Callable[..., Path]) -> None:
    config = load_config(write(MINIMAL)).config
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 4
    with pytest.raises(ValidationError, match="frozen"):
        config.model.path = "other"


@pytest.mark.parametrize("train", ["a.jsonl", "{path: a.jsonl}", "[a.jsonl]", "[{path: a.jsonl, name: lines}]"])
def test_one_dataset_may_be_written_in_short(write: Callable[..., Path], train: str) -> None:
    (dataset,) = load_config(write(f"model: {{path: m}}\nsteps: 1\ndata: {{train: {train}}}\n")).resolved()["data"][
        "train"
    ]
    assert (dataset["name"], dataset["path"]) == ("lines", "a.jsonl")


def test_a_plugins_section_is_typed_and_validated(plugins: FakePlugins) -> None:
    class Settings(Section):
        limit: int = 5
        """A number."""

    available = plugins.add("meter", config=Settings)
    base = {"plugins": ["meter"], "model": {"path": "m"}, "data": {"train": "a"}, "steps": 1}
    assert load_config(base, available=available).resolved()["meter"] == {"limit": 5}
    assert load_config(base, ["meter.limit=7"], available=available).resolved()["meter"] == {"limit": 7}
    with pytest.raises(ConfigError, match=r"meter\.limt is not a setting\. Did you mean 'limit'\?"):
        load_config({**base, "meter": {"limt": 7}}, available=available)


class RepeatingConfig(ComponentConfig):
    name: str = "repeating"
    inner: Annotated[ComponentConfig, Component("source")]
    """What is repeated."""


def test_a_component_may_hold_its_own_kind_but_never_itself(plugins: FakePlugins) -> None:
    register = lambda registry: registry.add(of_kind(RepeatingConfig, "source"), "m:C")  # noqa: E731
    available = plugins.add("repeating", register=register)
    base = {"plugins": ["repeating"], "model": {"path": "m"}, "data": {"train": "a"}, "steps": 1}
    repeating = {"name": "repeating", "inner": {"name": "text", "keep": 3}}
    loaded = load_config({**base, "source": repeating}, available=available)
    assert loaded.resolved()["source"]["inner"] == {"name": "text", "keep": 3}
    with pytest.raises(ConfigError, match=r"source\.inner is 'repeating', which cannot contain itself.*text"):
        load_config({**base, "source": {"name": "repeating", "inner": repeating}}, available=available)


@pytest.fixture
def schema() -> dict[str, Any]:
    return config_model(PluginHost.load([])).model_json_schema()


def test_the_json_schema_describes_every_core_setting(schema: dict[str, Any]) -> None:
    assert {"model", "data", "collator", "loss", "optimizer"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    sections = {f"#/$defs/{name}": section for name, section in schema["$defs"].items()}
    described = [{**sections.get(setting.get("$ref"), {}), **setting} for setting in schema["properties"].values()]
    assert all("description" in setting for setting in described)


def test_the_json_schema_knows_the_shorthands(schema: dict[str, Any]) -> None:
    bare = schema["properties"]["collator"]["anyOf"][0]
    assert bare["type"] == "string"
    assert {"packed", "padded", "core/packed"} <= set(bare["enum"])
    many, *single = schema["$defs"]["DataConfig"]["properties"]["train"]["anyOf"]
    assert many["items"] in single
    assert "oneOf" not in json.dumps(schema)


class LimitsConfig(Section):
    """What a plugin may take."""

    seconds: float = 10.0
    """Time."""


def test_a_plugin_adds_a_section_under_a_name_of_choice(plugins: FakePlugins) -> None:
    plugins.add("strict", register=lambda registry: registry.add_section("limits", LimitsConfig))
    settings = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "steps": 3, "plugins": ["strict"]}
    given = load_config({**settings, "limits": {"seconds": 3}}, available=plugins.available).config
    assert given.section(LimitsConfig).seconds == 3.0
    assert load_config(settings, available=plugins.available).config.section(LimitsConfig) == LimitsConfig()
    with pytest.raises(ConfigError, match=r"limits\.secnds"):
        load_config({**settings, "limits": {"secnds": 3}}, available=plugins.available)


def test_an_optional_section_of_a_plugin_is_there_when_the_file_has_it(plugins: FakePlugins) -> None:
    plugins.add("strict", register=lambda registry: registry.add_section("limits", LimitsConfig, optional=True))
    settings = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "steps": 3, "plugins": ["strict"]}
    assert load_config({**settings, "limits": {}}, available=plugins.available).config.section(LimitsConfig)
    with pytest.raises(LookupError, match="no section LimitsConfig"):
        load_config(settings, available=plugins.available).config.section(LimitsConfig)


def test_two_plugins_cannot_add_one_section(plugins: FakePlugins) -> None:
    for name in ("a", "b"):
        plugins.add(name, register=lambda registry: registry.add_section("limits", LimitsConfig))
    with pytest.raises(PluginError, match="the config section 'limits', which plugin 'a' has"):
        PluginHost.load(["a", "b"], plugins.available)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("evaluatoin.limits", "there is no section 'evaluatoin'. Did you mean 'evaluation'?"),
        ("a.b.c", "there is no section 'a.b'."),
        ("steps.limits", "there is no section 'steps'."),
        ("evaluation.limits", "which is not an EvaluationPart. Derive LimitsConfig from that class."),
        ("evaluation.batch_size", "which exists already. Give it another name."),
    ],
)
def test_a_section_that_has_no_place_is_told_why(plugins: FakePlugins, name: str, told: str) -> None:
    plugins.add("strict", register=lambda registry: registry.add_section(name, LimitsConfig))
    with pytest.raises(PluginError, match=re.escape(told)):
        config_model(PluginHost.load(["strict"], plugins.available))
