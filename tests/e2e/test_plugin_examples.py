"""The example plugins work, and the tutorials quote them word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = {"write-a-plugin.md": "plugin_template", "ema-tutorial.md": "plugin_ema"}
"""Page -> the example that it quotes."""

QUOTES = [
    (page, example, name, quote)
    for page, example in TUTORIALS.items()
    for name, quote in re.findall(
        r"^`(\S+)`:\n```\w+\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
]


def find(example: str, name: str) -> Path:
    folder = ROOT / "examples" / example
    (path,) = [path for path in folder.rglob(Path(name).name) if path.as_posix().endswith(f"/{name}")]
    return path


def lines_of(text: str) -> list[str]:
    """Without indentation and empty lines, which formatting changes in blocks that are complete in themselves."""
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.processes
def test_tests_of_the_examples_pass() -> None:
    folders = [ROOT / "examples" / example for example in TUTORIALS.values()]
    paths = [
        *(str(folder / "src") for folder in folders),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # One process for all, as importing torch takes as long as the tests.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command += [str(folder / "tests") for folder in folders]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_tutorial_quotes_its_example(page: str) -> None:
    assert len([quote for quote in QUOTES if quote[0] == page]) >= 6


@pytest.mark.parametrize(
    ("page", "example", "name", "quote"), QUOTES, ids=[f"{index}-{quote[2]}" for index, quote in enumerate(QUOTES)]
)
def test_quoted_lines_are_in_the_file_they_are_said_to_be_from(page: str, example: str, name: str, quote: str) -> None:
    assert "\n".join(lines_of(quote)) in "\n".join(lines_of(find(example, name).read_text(encoding="utf-8"))), page


def test_the_minimal_pyproject_of_the_tutorial_is_that_of_the_template_in_short() -> None:
    text = (ROOT / "docs" / "write-a-plugin.md").read_text(encoding="utf-8")
    (minimal,) = re.findall(r"```toml\n(\[build-system\].*?)```", text, re.DOTALL)
    shown, whole = tomllib.loads(minimal), tomllib.loads(find("plugin_template", "pyproject.toml").read_text("utf-8"))
    assert shown["build-system"] == whole["build-system"]
    assert shown["tool"]["hatch"] == whole["tool"]["hatch"]
    for name in ("name", "version", "requires-python", "dependencies"):
        assert shown["project"][name] == whole["project"][name]
    entry = "spurline.plugins"
    assert shown["project"]["entry-points"][entry] == whole["project"]["entry-points"][entry]
