"""Core stays small.

Everything that trains, reads, generates or draws is a plugin, ours as well as yours (docs/architecture.md), so that a
newcomer can read core in a day and every seam is proven by a package that uses it. The contract kit counts too. A
number that only grows says that a subject has moved in. To stay below it: move a feature to the package that owns its
subject, or replace something. Denser code, shorter docstrings and fewer blank lines are no way to meet it, and raising
it is a design decision.
"""

from __future__ import annotations

from pathlib import Path

CORE = Path(__file__).parents[2] / "core/src/spurline"
MOST_LINES = 12_000


def test_core_has_at_most_the_lines_that_it_is_allowed() -> None:
    paths = list(CORE.rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    assert len(paths) > 50
    assert lines <= MOST_LINES, f"core has {lines:,} lines; move a subject to the package that owns it"
