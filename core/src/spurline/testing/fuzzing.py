"""Settings of hypothesis for the suites of a contract kit."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def fuzzing(max_examples: int) -> settings:
    """Settings for a test in a suite that several classes inherit, each of which counts as another executor."""
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
