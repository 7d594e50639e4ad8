"""Check that the docstring of every public name begins as a maintainer would begin it: `make check` runs this.

Names the file and line of each docstring that begins with one of the words below. Those begin a fragment, and a reader
of an API page needs a sentence: what a function does, or what a class is.

    python docs/check_docstrings.py [FOLDER ...]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FRAGMENTS = {"what", "of", "as", "that", "in", "with", "by", "whoever", "whether", "for", "from", "where", "which"}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring of a public function, class, method or attribute."""
    yield from _inside(tree)


def _inside(node: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    previous: ast.stmt | None = None
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not statement.name.startswith("_"):
                if text := ast.get_docstring(statement):
                    yield statement.body[0].lineno, text
                if isinstance(statement, ast.ClassDef):
                    yield from _inside(statement)
        elif (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
            and isinstance(previous, ast.Assign | ast.AnnAssign)
        ):
            target = previous.targets[0] if isinstance(previous, ast.Assign) else previous.target
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield statement.lineno, statement.value.value
        previous = statement


def main(folders: list[str]) -> int:
    """Print the docstrings that begin with a fragment, and return 1 if there are any."""
    roots = [Path(folder) for folder in folders] or [ROOT / "core" / "src", *sorted(ROOT.glob("plugins/*/src"))]
    found = 0
    for path in sorted(file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))):
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            first = re.match(r"\W*(\w+)", text)
            if first is not None and first[1].lower() in FRAGMENTS:
                print(f"{path}:{line}: {text.splitlines()[0]}")
                found += 1
    if found:
        print(f"{found} docstrings begin with a fragment. Begin with a verb, or with what the class is.")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
