"""Assert on the problems that a ConfigError lists, by key and essential words instead of whole sentences."""

from __future__ import annotations

import pytest

from spurline.errors import ConfigError, Problem


def assert_problem(caught: pytest.ExceptionInfo[ConfigError], *, key: str, fix: str = "") -> Problem:
    """Return the first problem with this key whose message contains `fix`; fail with all problems if there is none."""
    for problem in caught.value.problems:
        if problem.key == key and fix in problem.message:
            return problem
    raise AssertionError(f"no problem at {key!r} that says {fix!r}, but:\n{caught.value}")
