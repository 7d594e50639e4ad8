"""What of the contract every run of the tests has, and what only long ones."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("SPURLINE_SOAK"):
        return
    left_out = [item for item in items if not _is_in_every_run(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_in_every_run(item: pytest.Item) -> bool:
    """Whether the class of a test lists nothing, or something that its name contains."""
    listed: tuple[str, ...] | None = getattr(getattr(item, "cls", None), "in_every_run", None)
    return listed is None or any(part in item.name for part in listed)
