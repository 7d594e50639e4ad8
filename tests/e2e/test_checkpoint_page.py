"""`docs/checkpoints.md` names the files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_helpers import Config, train

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def files_of_last_checkpoint(config: Config) -> set[str]:
    run = train({**config, "steps": 1})
    assert run.checkpoint is not None
    return {path.relative_to(run.checkpoint).as_posix() for path in run.checkpoint.rglob("*") if path.is_file()}


def layout_of_the_page() -> set[str]:
    """Paths of the tree that the page draws, below a checkpoint's folder."""
    folders: list[str] = []
    found = set[str]()
    for line in re.findall(r"^ {4}.*$", PAGE.split("## Layout")[1].split("```")[1], re.MULTILINE):
        depth, name = (len(line) - len(line.lstrip()) - 4) // 2, line.split()[0]
        folders[depth:] = [name] if name.endswith("/") else []
        if not name.endswith("/"):
            found.add("".join(folders) + name)
    return found


def test_the_tree_on_the_page_is_that_of_a_supervised_run(base_config: Config) -> None:
    base_config["data"]["eval"] = base_config["data"]["train"]
    assert files_of_last_checkpoint(base_config) == layout_of_the_page()


@pytest.mark.parametrize("with_critic", [False, True])
def test_the_page_names_what_a_run_with_rollouts_adds(rl_config: Config, with_critic: bool) -> None:
    if with_critic:
        rl_config |= {"critic": {}}
        rl_config["source"]["advantage"] = "gae"
    added = files_of_last_checkpoint(rl_config) - layout_of_the_page()
    assert len(added) == (5 if with_critic else 1)
    for path in added:
        folder, _, name = path.rpartition("/")
        assert f"`{path}`" in PAGE or (f"`{folder}/`" in PAGE and f"`{name}`" in PAGE), path
