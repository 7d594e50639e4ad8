"""What a newcomer copies from the first page works: pip lines, container file, picture, figures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from spurline import Run, load_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """(word, argument) of each instruction, continued lines put together."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line.strip()]


def braces(word: str) -> list[str]:
    """What a shell makes of `a{b,c}`."""
    before, brace, rest = word.partition("{")
    inner, _, after = rest.partition("}")
    return [f"{before}{choice}{after}" for choice in inner.split(",")] if brace else [word]


def pip_targets(command: str) -> list[str]:
    """What each `pip install` of a command installs, without options."""
    found: list[str] = []
    for part in re.split(r"&&|;|\n|\|\|", command):
        words = [word for given in shlex.split(part, comments=True) for word in braces(given)]
        if words[:2] == ["pip", "install"] or words[1:4] == ["-m", "pip", "install"]:
            rest = iter(words[words.index("install") + 1 :])
            for word in rest:
                if word in ("-c", "-r", "--index-url"):
                    next(rest)
                elif not word.startswith("-"):
                    found.append(word)
    return found


def readme_lines() -> list[str]:
    return [line[2:] for line in README.splitlines() if line.startswith("$ pip install")]


def test_the_first_screen_says_what_why_how_and_what_fits() -> None:
    headings = re.findall(r"^## (.*)$", README, re.M)
    assert headings[:4] == ["Why", "Two commands", "A run", "What fits"]
    assert "docs/images/report.png" in README.partition("## A run")[0]
    assert len(README.splitlines()) <= 194, "details belong into docs/"


def test_every_row_of_the_comparison_names_its_proof() -> None:
    table = README.partition("## Why")[2].partition("\n## ")[0]
    sources = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").partition("## What others say")[2]
    assert re.search(r"\bread in [A-Z][a-z]+ 20\d\d\b", sources)
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 5
    for row in rows:
        _, claim, ours, theirs, _ = re.split(r"(?<!\\)\|", row)
        assert re.search(r"\]\((tests|docs|benchmarks|examples)/", ours), f"no test or command for: {claim}"
        links = re.findall(r"\]\((https://[^)]+)\)", theirs)
        assert links, f"no source for what others do: {claim}"
        assert [link for link in links if f"({link})" not in sources] == [], f"a source without its state: {claim}"


def test_pip_lines_of_the_readme_install_packages_of_this_repository() -> None:
    lines = readme_lines()
    assert len(lines) >= 3
    for target in [target for line in lines for target in pip_targets(line)]:
        folder, extras = re.fullmatch(r"(.*?)(?:\[(.*)\])?", target.partition("#subdirectory=")[2] or target).groups()
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        known = project.get("optional-dependencies", {})
        assert {*filter(None, (extras or "").split(","))} <= {*known}, target
        assert project["name"].startswith("spurline")


def test_the_container_installs_what_the_readme_says() -> None:
    installed = {target for word, argument in instructions() if word == "RUN" for target in pip_targets(argument)}
    packages = {re.sub(r"\[.*", "", target) for target in installed if target.startswith("./")}
    said = {re.sub(r"\[.*", "", target) for line in readme_lines() for target in pip_targets(line)}
    assert packages == {"./core", *(f"./plugins/{path.name}" for path in (ROOT / "plugins").iterdir())}
    assert packages <= said


def test_everything_that_the_container_copies_is_there_and_passes_the_ignore_file() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [source for word, argument in instructions() if word == "COPY" for source in argument.split()[:-1]]
    assert {"core", "plugins", "examples", "constraints.txt"} <= {*copied}
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore, f"{source} is kept out by .dockerignore"


def test_the_container_needs_no_hub_and_ends_as_an_ordinary_user() -> None:
    words = instructions()
    runs = [argument for word, argument in words if word == "RUN"]
    assert not [run for run in runs if re.search(r"huggingface|hf download|snapshot", run)]
    checks = [part for run in runs for part in run.split("&&") if re.search(r"\bspurline plan|make_tiny_model", part)]
    assert checks
    assert all("HF_HUB_OFFLINE=1" in check for check in checks)
    users = [argument for word, argument in words if word == "USER"]
    assert users == ["spurline"]
    last_root = max(number for number, (word, _) in enumerate(words) if word in ("RUN", "COPY"))
    assert words.index(("USER", "spurline")) > last_root
    assert json.loads(dict(words)["ENTRYPOINT"]) == ["spurline"]


@pytest.mark.processes
@pytest.mark.parametrize(("variant", "expected"), [("cpu", "whl/cpu"), ("cuda", "torch=="), ("rocm", None)])
def test_each_variant_of_the_container_installs_its_torch(variant: str, expected: str | None, tmp_path: Path) -> None:
    (command,) = [argument for word, argument in instructions() if word == "RUN" and argument.startswith("case")]
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    pip.chmod(0o755)
    environment = {**os.environ, "VARIANT": variant, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30
    )
    if expected is None:
        assert result.returncode == 1
        assert "Choose cpu or cuda" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
    assert re.search(r"torch==[\d.]+$", result.stdout.strip())
    assert ("index-url" in result.stdout) == (variant == "cpu")


def test_the_front_page_of_the_docs_lists_what_a_run_leaves_behind(
    spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8").partition("## What a run leaves behind")[2]
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    config = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "eval": str(spurline_chat_file), "max_length": 128},
        "batch_size": 4,
        "steps": 1,
        "collator": "padded",
        "backend": {"device": "cpu"},
        "evaluation": {"generate": {"rewards": {"exact": "exact_match"}, "max_samples": 2, "max_new_tokens": 4}},
        "checkpoint": {"export_hf": True},
    }
    Run(load_config(config)).train()
    found = {path.name + "/" * path.is_dir() for path in (tmp_path / "run").iterdir()}
    assert found == {*listed}


@pytest.fixture(scope="module")
def what_fits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("what_fits", ROOT / "benchmarks/what_fits.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


# Each table has half of the models in every run; the soak measures all of both.
@pytest.mark.parametrize(("page", "option", "first"), [("README.md", [], 0), ("docs/many-gpus.md", ["--many"], 1)])
def test_what_fits_is_what_the_program_prints(
    what_fits: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    page: str,
    option: list[str],
    first: int,
) -> None:
    monkeypatch.setattr(sys, "argv", ["what_fits.py", *option])
    every = what_fits.MODELS
    measured = every if os.environ.get("SPURLINE_SOAK") else dict(list(every.items())[first::2])
    monkeypatch.setattr(what_fits, "MODELS", measured)
    what_fits.main()
    head, line, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = text.partition(f"{head}\n{line}\n")[2].partition("\n\n")[0].splitlines()
    assert [row.split("|")[1].strip() for row in shown] == list(every)
    assert [row for row in shown if row.split("|")[1].strip() in measured] == rows
    assert len(rows) >= 3


def test_the_smallest_model_has_its_published_size_and_fits_as_estimated(
    what_fits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_fits, "MODELS", {"Qwen3-0.6B": what_fits.MODELS["Qwen3-0.6B"]})
    [found] = what_fits.measure().values()
    # 596,049,920 parameters: weights and two moments in fp32 and the rounded weights are 14 bytes each; gradients come
    # while activations and logits of 4,096 positions go.
    assert 14 * 596_049_920 / 2**30 < found["SFT, all weights"] < 18
    assert found["SFT, LoRA"] < found["SFT, all weights"]
    assert found["RL, all weights"] > found["SFT, all weights"]
