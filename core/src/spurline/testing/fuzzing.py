"""Settings of hypothesis for the suites of a contract kit."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def fuzzing(max_examples: int) -> settings:
    """Return settings for a property test that several test classes inherit.

    hypothesis counts each of these classes as a different executor and would otherwise fail its health check.
    """
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
