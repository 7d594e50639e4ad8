"""Which tests of a folder every run has, and which only long ones (SPURLINE_SOAK=1).

A class lists in `in_every_run` what the names of its tests contain that every run has. Slow tests of classes without
such a list are in long runs only.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SOAK = bool(os.environ.get("SPURLINE_SOAK"))
IN_LONG_RUNS = [pytest.mark.slow, pytest.mark.skipif(not SOAK, reason="SPURLINE_SOAK=1")]
"""Marks of what only long runs have."""


def leave_out(folder: Path, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests below this folder that only long runs have. For `pytest_collection_modifyitems`."""
    left_out = [item for item in items if folder in item.path.parents and not _is_in_every_run(item)]
    if SOAK:
        # Long runs choose tests by this mark.
        for item in left_out:
            item.add_marker(pytest.mark.slow)
    elif left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_in_every_run(item: pytest.Item) -> bool:
    listed: tuple[str, ...] | None = getattr(getattr(item, "cls", None), "in_every_run", None)
    if listed is None:
        return item.get_closest_marker("slow") is None
    return any(part in item.name for part in listed)
