"""`help()` tells what a program or a plugin author needs, without the source at hand."""

from __future__ import annotations

import inspect
import os
import pydoc

import pytest
from bare_components import TableConfig

from spurline.cli import main
from spurline.config.loading import config_model
from spurline.config.section import summary_of
from spurline.plugins.host import PluginHost
from spurline.plugins.registry import resolve

KINDS = PluginHost.load([]).registry.kinds


def told(thing: object) -> str:
    return pydoc.plain(pydoc.render_doc(thing))


@pytest.mark.parametrize("kind", KINDS)
def test_help_of_a_kinds_protocol_tells_what_each_of_its_attributes_means(kind: str) -> None:
    protocol = resolve(KINDS[kind].protocol, kind)
    text = told(protocol)
    for name in inspect.get_annotations(protocol):
        assert f" {name}: " in text or f"`{name}`" in text, name


def test_the_schema_describes_each_section_by_its_docstring(bare: None) -> None:
    class Named(TableConfig):
        name: str = "named"

    model = config_model(PluginHost.load([]))
    assert summary_of(Named) == summary_of(TableConfig) == "A table of logits in this process."
    schema = model.model_json_schema()
    described = [schema["description"], *(part.get("description", "") for part in schema["$defs"].values())]
    assert "One training run: the whole configuration file." in described


@pytest.mark.parametrize("chosen", [None, "0"])
def test_the_command_sends_no_statistics_of_its_use_to_the_hub_unless_the_user_wants_that(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "HF_HUB_DISABLE_TELEMETRY"
    # Whatever the command sets is taken back.
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        del os.environ[name]
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert os.environ[name] == (chosen or "1")
