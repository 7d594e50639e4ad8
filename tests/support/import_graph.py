"""Which module of this project imports which, read from the source without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "core/src", *sorted(ROOT.glob("plugins/*/src")))

When = Literal["top", "type", "lazy"]


@dataclass(frozen=True)
class Import:
    """One name that a module imports. module: where from, of this project. name: None for the module itself. when: as
    the module is imported, for a type checker alone, or within a function."""

    module: str
    name: str | None
    when: When


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the project."""
    found = {path: path.relative_to(source).with_suffix("") for source in SOURCES for path in source.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for path, name in found.items()}


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """What a file imports of this project."""
    return tuple(imports_in(ast.parse(path.read_text(encoding="utf-8"))))


def imports_in(node: ast.AST, when: When = "top") -> Iterator[Import]:
    """What a piece of code imports of this project."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        when = "type"
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        when = "lazy"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, when) for alias in child.names if alias.name in modules())
        elif isinstance(child, ast.ImportFrom) and child.module in modules():
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield Import(inner, None, when) if inner in modules() else Import(child.module, alias.name, when)
        yield from imports_in(child, when)
