"""Loading a config with the components of the plugins: defaults, the JSON schema, the shipped examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from fake_plugins import FakePlugins, of_kind

from spurline import load_config
from spurline.config.document import read_document
from spurline.config.loading import LoadedConfig, config_model
from spurline.config.section import Component, ComponentConfig
from spurline.errors import ConfigError
from spurline.plugins.host import PluginHost
from spurline.plugins.registry import ComponentRegistrar

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
MINIMAL = "model: {path: m}\ndata: {train: rows.jsonl}\nsteps: 3\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_what_the_file_leaves_out_gets_defaults(write: Callable[..., Path]) -> None:
    resolved = load_config(write(MINIMAL)).resolved()
    assert resolved["collator"]["name"] == "packed"
    assert resolved["backend"]["name"] == "local"
    assert resolved["optimizer"]["betas"] == [0.9, 0.95]
    assert resolved["data"]["train"][0] | {"split": "train", "weight": 1.0} == resolved["data"]["train"][0]


def test_resolved_settings_load_to_themselves(write: Callable[..., Path]) -> None:
    resolved = load_config(write(MINIMAL)).resolved()
    assert load_config(json.loads(json.dumps(resolved))).resolved() == resolved


@pytest.mark.parametrize("train", ["a.jsonl", "{path: a.jsonl}", "[a.jsonl]", "[{path: a.jsonl, name: hf}]"])
def test_one_dataset_may_be_written_in_short(write: Callable[..., Path], train: str) -> None:
    (dataset,) = load_config(write(f"model: {{path: m}}\nsteps: 1\ndata: {{train: {train}}}\n")).resolved()["data"][
        "train"
    ]
    assert (dataset["name"], dataset["path"]) == ("hf", "a.jsonl")


class ScaledConfig(ComponentConfig):
    name: str = "scaled"
    inner: Annotated[ComponentConfig, Component("reward")]
    """What is scaled."""


def nested(plugins: FakePlugins, kind: str) -> LoadedConfig:
    def register(registry: ComponentRegistrar) -> None:
        registry.add(of_kind(ScaledConfig, kind), "m:C")

    available = plugins.add("scaling", register=register)
    settings = {"name": "scaled", "inner": {"name": "exact_match", "ignore_case": True}}
    base = {"plugins": ["scaling"], "model": {"path": "m"}, "data": {"train": "a"}, "steps": 1}
    return load_config({**base, "source": settings}, available=available)


def test_a_component_inside_a_component_is_chosen_by_name_too(plugins: FakePlugins) -> None:
    inner = nested(plugins, "source").resolved()["source"]["inner"]
    assert inner == {"name": "exact_match", "ignore_case": True}


def test_a_component_may_hold_its_own_kind_but_never_itself(plugins: FakePlugins) -> None:
    def register(registry: ComponentRegistrar) -> None:
        registry.add(of_kind(ScaledConfig, "reward"), "m:C")

    available = plugins.add("scaling", register=register)
    base = {"plugins": ["scaling"], "model": {"path": "m"}, "data": {"train": "a", "eval": "a"}, "steps": 1}

    def load(reward: dict[str, Any]) -> LoadedConfig:
        return load_config({**base, "evaluation": {"generate": {"rewards": reward}}}, available=available)

    scaled = {"name": "scaled", "inner": {"name": "exact_match", "ignore_case": True}}
    rewards = load({"right": scaled}).resolved()["evaluation"]["generate"]["rewards"]
    assert rewards["right"]["inner"] == {"name": "exact_match", "ignore_case": True}
    with pytest.raises(ConfigError, match=r"right\.inner is 'scaled', which cannot hold itself.*exact_match"):
        load({"right": {"name": "scaled", "inner": scaled}})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads(example: Path) -> None:
    config = load_config(example).config
    assert config.run_dir == Path("runs") / example.stem


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return config_model(
        PluginHost.load(["collation_fast", "async_rl", "fsdp_backend", "megatron_backend"])
    ).model_json_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Any:
    """Made once: checking the schema itself takes longer than all examples."""
    validators = pytest.importorskip("jsonschema.validators")
    kind = validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_fits_the_json_schema(example: Path, validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(read_document(example).values)] == []


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
