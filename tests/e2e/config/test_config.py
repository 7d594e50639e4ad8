"""The shipped examples load with the components of the plugins, and fit the JSON schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spurline import load_config
from spurline.config.document import read_document
from spurline.config.loading import config_model
from spurline.plugins.host import PluginHost

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


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
