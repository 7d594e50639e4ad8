"""What of this folder every run of the tests has; see `every_run`."""

from __future__ import annotations

from pathlib import Path

import pytest
from every_run import leave_out

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(HERE, config, items)
