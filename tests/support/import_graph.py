"""Which module of this project imports which, read from the source, and what each package offers to others.

A package offers the names that other packages, examples and pages import of it, so that a name joins an interface when
its first user comes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "core/src", *sorted(ROOT.glob("plugins/*/src")))

PAGES = ("README.md", "*/README.md", "plugins/*/README.md", "examples/*/README.md", "docs/*.md")

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
    """Return the imports from this project in a file."""
    return tuple(imports_in(ast.parse(path.read_text(encoding="utf-8"))))


def imports_in(node: ast.AST, when: When = "top") -> Iterator[Import]:
    """Yield the imports from this project in a piece of code."""
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


def offered() -> dict[str, list[str]]:
    """Return by package a line for each module or name that others import: `module`, or `module:name(parameters)`."""
    lines: dict[str, set[str]] = {}
    for user, used in _uses():
        package = used.module.partition(".")[0]
        if user != package:
            lines.setdefault(package, set()).add(_line(used))
    return {package: sorted(lines[package]) for package in sorted(lines)}


def _uses() -> Iterator[tuple[str, Import]]:
    for name, path in modules().items():
        yield from ((name.partition(".")[0], used) for used in imports_of(path))
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield from (("examples", used) for used in imports_of(path))
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        yield from (("pages", used) for used in imports_of_page(path))


def imports_of_page(path: Path) -> Iterator[Import]:
    """Yield the imports from this project in the Python blocks of a page, which may be fragments."""
    for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
        for statement in re.findall(r"^ *(?:from spurline\S* import (?:\([^)]*\)|.+)|import spurline.*)$", block, re.M):
            yield from imports_in(ast.parse(textwrap.dedent(statement)))


def _line(used: Import) -> str:
    if used.name is None:
        return used.module
    value = getattr(importlib.import_module(used.module), used.name)
    return f"{used.module}:{used.name}{parameters(value)}"


def parameters(value: Any) -> str:
    """Names of a function's parameters in brackets; nothing for anything else."""
    return f"({', '.join(inspect.signature(value).parameters)})" if inspect.isfunction(value) else ""
