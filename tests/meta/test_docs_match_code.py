"""The documentation says what the code says."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spurline.config.run_config import RunConfig
from spurline.plugins import hookspecs
from spurline.plugins.host import hooks_of
from spurline_rl import hookspecs as rl_hookspecs

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_reference_pages_are_what_the_code_generates() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr


HOOKS = {**hooks_of(hookspecs), **hooks_of(rl_hookspecs)}


def test_core_has_ten_hooks_and_rl_two() -> None:
    # A new thing that exactly one plugin must answer is a component; raising this number needs a design decision.
    assert list(HOOKS) == [
        "register_components",
        "on_run_start",
        "on_step_start",
        "train_step",
        "on_optimizer_step",
        "on_step_end",
        "on_eval_end",
        "on_checkpoint_saved",
        "on_run_end",
        "on_run_recorded",
        "on_rollouts_scored",
        "on_weights_synced",
    ]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_says_when_what_and_what_an_error_does(name: str) -> None:
    text = HOOKS[name].__doc__ or ""
    assert "Errors:" in text
    for argument in inspect.signature(HOOKS[name]).parameters:
        assert f"{argument}:" in text, f"{name} does not describe {argument}"


def test_every_setting_has_a_description() -> None:
    def undescribed(section: type, prefix: str) -> list[str]:
        found = []
        for name, field in section.model_fields.items():
            if not field.description:
                found.append(prefix + name)
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                found += undescribed(field.annotation, f"{prefix}{name}.")
        return found

    assert undescribed(RunConfig, "") == []


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"], ids=lambda path: path.name
)
def test_relative_links_in_the_docs_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_line_that_the_tour_quotes_stands_in_the_code() -> None:
    sources = [path for folder in ("core", "plugins") for path in (ROOT / folder).rglob("src/**/*.py")]
    code = {line.strip() for path in sources for line in path.read_text(encoding="utf-8").splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tour.md").read_text(encoding="utf-8"), re.S)
    # Formatting takes the indentation away from blocks that are complete in themselves.
    quoted = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    assert quoted
    assert [line for line in quoted if line not in code] == []


def test_the_loop_file_stays_short() -> None:
    source = (ROOT / "core/src/spurline/run/loop.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
