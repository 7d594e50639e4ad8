"""Code asks for capabilities and never for a name or a class; packages keep their private names to themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from spurline.plugins.host import PluginHost

KINDS = PluginHost.load([]).registry.kinds

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path for path in sorted(ROOT.glob("*/src/*")) + sorted(ROOT.glob("plugins/*/src/*"))}


def checks_of_classes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Calls of isinstance and issubclass with a class that is called a config."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2):
            continue
        if node.func.id in ("isinstance", "issubclass"):
            classes = {name.split(".")[-1] for name in dotted_names(node.args[1])}
            if found := sorted(name for name in classes if name.endswith("Config")):
                yield (node.lineno, f"{node.func.id} of {', '.join(found)}: say it in the kind's facts")


def probes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`getattr(run.source, "name", default)`: asks whether a component's settings have something."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 3):
            continue
        if node.func.id == "getattr":
            asked, name = node.args[:2]
            if isinstance(asked, ast.Attribute) and asked.attr in KINDS and isinstance(name, ast.Constant):
                yield node.lineno, f"getattr of {ast.unparse(asked)}: say it in the kind's facts"


def dotted_names(node: ast.expr) -> list[str]:
    """Every name or attribute in a class, a tuple of classes or a union of them."""
    return [ast.unparse(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))]


def private_imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Private modules and names of other packages of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in imported:
            first, *rest = name.split(".")
            private = [part for part in rest if part.startswith("_") and not part.startswith("__")]
            if first != package and first.startswith("spurline") and private:
                yield node.lineno, f"imports {name}, which is private to {first}"


def complaints(path: Path, text: str, package: str) -> list[str]:
    """What is wrong with a source file, one line each."""
    tree = ast.parse(text)
    found = list(private_imports(tree, package))
    if "config" not in path.parts:
        found += [*checks_of_classes(tree), *probes(tree)]
    return [f"{path}:{line}: {problem}" for line, problem in sorted(found)]


def test_no_code_asks_which_component_it_has() -> None:
    found: list[str] = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            found += complaints(path.relative_to(ROOT), path.read_text(encoding="utf-8"), package)
    assert not found, "\n".join(found)
