"""Functions in settings are found beside the config file or in the working directory, and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import load

from spurline.config.loading import LoadedConfig
from spurline.errors import PluginError
from spurline_rl.rewards.function import load_function


def data_path(loaded: LoadedConfig) -> str:
    return str(loaded.resolved()["data"]["train"][0]["path"])


def reward(project: Path, path: str) -> str:
    loaded = load(
        project,
        **{
            "data.eval": "org/rows",
            "evaluation.generate": f'{{rewards: {{x: "{path}"}}}}',
        },
    )
    return str(loaded.resolved()["evaluation"]["generate"]["rewards"]["x"]["path"])


@pytest.mark.parametrize("folder", ["configs", "work"])
@pytest.mark.parametrize("written", ["test_paths_{0}:f", "test_paths_{0}.py:f", "./test_paths_{0}.py:f"])
def test_reward_functions_beside_the_config_or_here_are_found_by_module_and_by_file(
    project: Path, folder: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / folder / f"test_paths_{folder}.py").write_text(
        f"def f(answer):\n    return {folder!r}\n", encoding="utf-8"
    )
    path = reward(project, written.format(folder))
    assert path.startswith(f"{project}/{folder}/test_paths_{folder}")
    monkeypatch.chdir(project / "home")
    assert load_function(path, "reward function")(None) == folder


def test_modules_of_a_package_beside_the_config_import_each_other(project: Path) -> None:
    package = project / "configs" / "test_paths_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("VALUE = 7\n", encoding="utf-8")
    (package / "rewards.py").write_text("from .parts import VALUE\n\ndef f(answer):\n    return VALUE\n", "utf-8")
    assert load_function(reward(project, "test_paths_package.rewards:f"), "reward function")(None) == 7


def test_a_reward_module_of_an_installed_name_is_an_error(project: Path) -> None:
    (project / "configs" / "colorsys.py").write_text("def f(answer):\n    return 3\n", encoding="utf-8")
    with pytest.raises(PluginError, match=r"'colorsys' is .* a module that is installed.*configs/colorsys\.py:rgb"):
        load_function(reward(project, "colorsys:rgb_to_hls"), "reward function")
    path = str(project / "configs" / "colorsys.py")
    assert (
        load_function(f"{path}:f", "reward function")(None)
        == load_function(reward(project, "colorsys.py:f"), "r")(None)
        == 3
    )


def test_a_reward_file_that_is_missing_is_told_with_those_that_are_there(project: Path) -> None:
    (project / "work" / "test_paths_near.py").touch()
    with pytest.raises(PluginError, match=r"test_paths_neer\.py, which does not exist\. Did you mean 'test_paths_near"):
        load_function(reward(project, "test_paths_neer.py:f"), "reward function")
