"""Fixtures of core's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_plugins import FakePlugins


@pytest.fixture
def plugins() -> Iterator[FakePlugins]:
    """Plugins that exist only in memory, gone after the test."""
    with FakePlugins() as fakes:
        yield fakes
