"""What of this folder every run of the tests has, and what only long ones (SPURLINE_SOAK=1)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("SPURLINE_SOAK"):
        return
    left_out = [item for item in items if not _is_in_every_run(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_in_every_run(item: pytest.Item) -> bool:
    """Whether the class of a test lists something that its name contains; slow tests of no such class are not."""
    if HERE not in item.path.parents:
        return True
    listed: tuple[str, ...] | None = getattr(getattr(item, "cls", None), "in_every_run", None)
    if listed is None:
        return item.get_closest_marker("slow") is None
    return any(part in item.name for part in listed)
