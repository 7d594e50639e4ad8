"""The plugin template works, and the tutorial quotes it word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "plugin_template"
TUTORIAL = ROOT / "docs" / "write-a-plugin.md"

QUOTES = re.findall(r"^`(\S+)`:\n```\w+\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def find(name: str) -> Path:
    (path,) = [path for path in TEMPLATE.rglob(Path(name).name) if path.as_posix().endswith(f"/{name}")]
    return path


@pytest.mark.processes
def test_tests_of_the_template_pass() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TEMPLATE / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TEMPLATE / "tests")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_tutorial_quotes_the_template() -> None:
    assert len(QUOTES) >= 8


@pytest.mark.parametrize(("name", "quote"), QUOTES, ids=[f"{index}-{name}" for index, (name, _) in enumerate(QUOTES)])
def test_quoted_lines_are_in_the_file_they_are_said_to_be_from(name: str, quote: str) -> None:
    assert quote in find(name).read_text(encoding="utf-8")
