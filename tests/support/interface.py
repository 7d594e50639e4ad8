"""What each package of this project offers to others: the names that other packages, examples and pages import of it.

Made of the imports themselves, so that an interface is what somebody uses, and a name joins it when its first user
comes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from import_graph import ROOT, Import, imports_in, imports_of, modules

PAGES = ("README.md", "*/README.md", "plugins/*/README.md", "examples/*/README.md", "docs/*.md")


def offered() -> dict[str, list[str]]:
    """Package -> a line for each module or name that others import of it: `module`, or `module:name(parameters)`."""
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
    """What the Python of a page imports of this project; its blocks may be fragments."""
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
