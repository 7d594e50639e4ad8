"""Code asks for capabilities and never for a name or a class; packages keep their private names to themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from spurline.plugins.host import PluginHost
from spurline.plugins.official import DEFAULT_PLUGINS, OFFICIAL

KINDS = PluginHost.load([]).registry.kinds

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path for path in sorted(ROOT.glob("*/src/*")) + sorted(ROOT.glob("plugins/*/src/*"))}
PLUGINS = [name for name in OFFICIAL if name not in DEFAULT_PLUGINS]


def component_names(plugins: list[str]) -> dict[str, set[str]]:
    """Kind -> names of all components: of core, of default plugins and of these."""
    names: dict[str, set[str]] = {}
    for entry in PluginHost.load(plugins).registry.entries():
        # Panels are called like what they show, `loss` or `config`, so their names say nothing.
        if entry.kind != "report_panel":
            names.setdefault(entry.kind, set()).add(entry.name)
    return names


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


def lists_of_components(tree: ast.Module, names: dict[str, set[str]]) -> Iterator[tuple[int, str]]:
    """Tuples, lists and sets, and keys of dicts, that hold two or more names of components of one kind."""
    skipped = set(parts_that_declare(tree))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            items: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            items = [*node.keys]
        else:
            continue
        texts = {item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)}
        for kind, known in names.items():
            found = sorted(text for text in texts if text.rpartition("/")[2] in known)
            if len(found) > 1:
                yield node.lineno, f"a list of {kind} names, {', '.join(found)}: say it in the kind's facts"


def parts_that_declare(tree: ast.Module) -> Iterator[ast.AST]:
    """Types such as `Literal["auto", "cpu"]`; an engine's `transports`, and the readers it has for their buckets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            yield from ast.walk(node.slice)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            called = {ast.unparse(target).rpartition(".")[2].strip("_").lower() for target in targets}
            if called & {"transports", "readers"}:
                yield from ast.walk(node)
        elif isinstance(node, ast.FunctionDef) and node.name.strip("_") == "transports":
            yield from ast.walk(node)


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


def complaints(path: Path, text: str, package: str, names: dict[str, set[str]]) -> list[str]:
    """What is wrong with a source file, one line each."""
    tree = ast.parse(text)
    found = list(private_imports(tree, package))
    if "config" not in path.parts:
        found += [*checks_of_classes(tree), *probes(tree)]
    # The tables of what there is.
    if path.name not in ("builtin.py", "plugin.py", "official.py"):
        found += lists_of_components(tree, names)
    return [f"{path}:{line}: {problem}" for line, problem in sorted(found)]


@pytest.fixture(scope="module")
def names() -> dict[str, set[str]]:
    return component_names(PLUGINS)


def test_no_code_asks_which_component_it_has(names: dict[str, set[str]]) -> None:
    assert {"packed", "padded"} <= names["collator"]
    found: list[str] = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            found += complaints(path.relative_to(ROOT), path.read_text(encoding="utf-8"), package, names)
    assert not found, "\n".join(found)
