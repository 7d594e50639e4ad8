"""A run is read where fewer packages are installed, and what hooks attach to a run ends with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Config, fail, train

from spurline import load_config
from spurline.errors import HookFailedError, PluginError
from spurline.plugins.host import PluginHost
from spurline_insight import health
from spurline_insight.health import Finding

WITHOUT = ["-preference", "-rl", "-ranks", "-insight", "-planning", "-trackers"]


def test_a_run_that_was_recorded_with_all_packages_is_exported_with_text_and_models(
    base_config: Config, tmp_path: Path
) -> None:
    run_dir = Path(base_config["run_dir"])
    assert train(base_config | {"steps": 2, "checkpoint": {"every_steps": 2}}).step == 2
    recorded = json.loads((run_dir / "config.json").read_text())
    assert {"critic", "cluster", "report"} <= recorded.keys()
    loaded = load_config({**recorded, "plugins": WITHOUT}, recorded=True)
    assert set(loaded.host.plugins) == {"core", "text", "models"}
    from spurline_models.export import export_run

    assert (tmp_path / "model").name in str(export_run(loaded, tmp_path / "model"))
    assert (tmp_path / "model" / "config.json").exists()


def test_a_run_goes_on_where_a_package_came_or_went(base_config: Config) -> None:
    assert train(base_config | {"steps": 2}).step == 2
    fewer = base_config | {"steps": 4, "plugins": ["-rl", "-trackers"]}
    assert train(fewer, allow_change=["plugins"]).step == 4


def test_a_failing_end_of_another_plugin_costs_no_warning_and_no_later_run(
    base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding("off", "Something is off.", (0,), lasts=True)
    monkeypatch.setattr(health, "findings", lambda lines, config: [found])
    with pytest.raises(HookFailedError):
        train(base_config, steps=2, on_run_end=fail)
    summary = json.loads((Path(base_config["run_dir"]) / "summary.json").read_text())
    assert [warning["kind"] for warning in summary["warnings"]] == ["off"]
    assert train(base_config, steps=2).status == "finished"


@pytest.mark.parametrize("made", ["a text", {"report": Path("other.html")}])
def test_files_of_a_record_that_are_no_mapping_or_take_a_name_are_told(base_config: Config, made: Any) -> None:
    with pytest.raises(PluginError, match="on_run_recorded returned"):
        train(base_config, steps=2, on_run_recorded=lambda: made)


def test_what_is_attached_for_a_run_is_taken_back_and_what_was_there_stays() -> None:
    host = PluginHost.load([])

    class Nothing:
        pass

    host.attach(Nothing(), "mine/stays")
    with host.attachments():
        host.attach(Nothing(), "mine/goes")
    host.attach(Nothing(), "mine/goes")
    with pytest.raises(PluginError, match="attached already"):
        host.attach(Nothing(), "mine/stays")
