"""Paths in settings: expanded, found beside the config file or in the working directory, and never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
from config_files import load

from spurline.config.loading import LoadedConfig, load_config
from spurline.config.paths import ConfigPlace, PathSetting, shown_path
from spurline.config.run_config import ModelConfig
from spurline.config.section import Section
from spurline.errors import ConfigError

pytestmark = pytest.mark.usefixtures("bare")


def data_path(loaded: LoadedConfig) -> str:
    return str(loaded.resolved()["data"]["train"][0]["path"])


def test_home_and_variables_are_expanded_everywhere_a_path_is_read(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PATHS", str(project / "configs"))
    loaded = load(
        project,
        run_dir="~/runs",
        **{
            "data.train": "$TEST_PATHS/rows.jsonl",
            "model.path": "${TEST_PATHS}/model",
            "model.tokenizer": "~/tokenizer",
            "model.chat_template": "$TEST_PATHS/chat.jinja",
        },
    )
    assert str(loaded.config.run_dir) == str(project / "home" / "runs")
    assert data_path(loaded) == f"{project}/configs/rows.jsonl"
    model = loaded.config.model
    assert model.path == f"{project}/configs/model"
    assert model.tokenizer == f"{project}/home/tokenizer"
    assert model.chat_template == f"{project}/configs/chat.jinja"
    assert not (project / "work" / "~").exists()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("$NOT_SET_AT_ALL/rows.jsonl", r"the environment variable NOT_SET_AT_ALL is not set"),
        ("~nobody_of_that_name/rows.jsonl", r"there is no such user"),
    ],
)
def test_what_cannot_be_expanded_is_an_error_with_its_key(project: Path, path: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.train\.0\.path is '.*': {problem}"):
        load(project, **{"data.train": path})
    with pytest.raises(ConfigError, match=rf"run_dir is '.*': {problem}"):
        load(project, run_dir=path)


def test_relative_paths_begin_at_the_config_file_then_at_the_working_directory(project: Path) -> None:
    (project / "configs" / "beside.jsonl").touch()
    (project / "work" / "here.jsonl").touch()
    (project / "configs" / "many").mkdir()
    (project / "configs" / "many" / "a.jsonl").touch()
    assert data_path(load(project, **{"data.train": "beside.jsonl"})) == f"{project}/configs/beside.jsonl"
    assert data_path(load(project, **{"data.train": "here.jsonl"})) == f"{project}/work/here.jsonl"
    assert data_path(load(project, **{"data.train": "many/*.jsonl"})) == f"{project}/configs/many/*.jsonl"
    (project / "work" / "beside.jsonl").touch()
    assert data_path(load(project, **{"data.train": "beside.jsonl"})) == f"{project}/configs/beside.jsonl"
    assert data_path(load(project)) == "org/rows"
    assert str(load(project, run_dir="runs/a").config.run_dir) == "runs/a"


def test_the_name_of_a_bundled_template_is_no_path(project: Path) -> None:
    (project / "work" / "chatml").touch()
    assert load(project, **{"model.chat_template": "chatml"}).config.model.chat_template == "chatml"
    chosen = load(project, **{"model.chat_template": "./chatml"}).config.model.chat_template
    assert chosen == f"{project}/work/chatml"


def test_what_a_run_writes_down_means_the_same_from_any_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "configs" / "beside.jsonl").touch()
    loaded = load(project, **{"data.train": "beside.jsonl"})
    written = json.loads(json.dumps(loaded.resolved()))
    monkeypatch.chdir(project / "home")
    (project / "home" / "beside.jsonl").touch()
    assert data_path(load_config(written, recorded=True)) == data_path(loaded)


class PluginSection(Section):
    """As a plugin would write it."""

    cache: Annotated[Path, PathSetting()] = Path("~/cache")
    """Where things are kept."""


def test_a_plugins_path_follows_the_same_rules(project: Path) -> None:
    assert PluginSection().cache == project / "home" / "cache"
    read = PluginSection.model_validate({"cache": "~/other"}, context=ConfigPlace(project))
    assert read.cache == project / "home" / "other"
    assert ModelConfig(path="~/model").path == f"{project}/home/model"


def test_people_see_paths_below_their_folder_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(tmp_path / "models" / "tiny")) == "models/tiny"
    assert shown_path("/elsewhere/tiny") == "/elsewhere/tiny"
    assert shown_path("someone/model") == "someone/model"
