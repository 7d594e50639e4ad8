"""The age of tokens, and what happens to those over the bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from spurline.errors import PluginError
from spurline_async_rl.source.staleness import staleness_metrics, version_range
from spurline_rl.trajectory import Group, Trajectory, Turn


def group_of(versions: Sequence[int] | None, mask: Sequence[int] | None = None) -> Group:
    count = 3 if versions is None else len(versions)
    turn = Turn(
        np.array([1]),
        np.arange(count),
        np.ones(count) if mask is None else np.array(mask),
        versions=None if versions is None else np.array(versions),
    )
    return Group("u@0", 0, (Trajectory("u@0", 0, (turn,)),))


def test_tokens_are_counted_by_their_age_and_untrained_ones_not_at_all() -> None:
    metrics = staleness_metrics([group_of([5, 5, 4, 3]), group_of([1, 5], mask=[0, 1])], 5, 2)
    assert [metrics[f"staleness/tokens_{age}"] for age in range(3)] == [3, 1, 1]
    assert metrics["staleness/mean"] == pytest.approx(3 / 5)
    assert metrics["staleness/max"] == 2


def test_a_trained_token_over_the_bound_is_a_broken_promise() -> None:
    with pytest.raises(AssertionError, match="bound 2"):
        staleness_metrics([group_of([2])], 5, 2)


def test_a_token_of_weights_that_do_not_exist_yet_is_a_broken_promise() -> None:
    with pytest.raises(ValueError, match="negative"):
        staleness_metrics([group_of([6])], 5, 2)


def test_turns_without_versions_cannot_be_bounded() -> None:
    with pytest.raises(PluginError, match=r"without versions of its tokens.*policy\.finish"):
        staleness_metrics([group_of(None)], 5, 2)


def test_the_versions_of_a_group_range_over_all_its_turns() -> None:
    assert version_range(group_of([4, 4, 7, 5])) == (4, 7)
