"""Settings of hypothesis for the suites of a contract kit."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def fuzzing(max_examples: int) -> settings:
    """Return settings for a property test that several test classes inherit.

    Without them, a health check of hypothesis would fail, since each class counts as a different executor.
    """
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
