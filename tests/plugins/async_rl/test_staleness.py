"""The age of tokens, and what happens to those over the bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from spurline.errors import PluginError
from spurline_async_rl.source.staleness import fresh_mismatch, mask_over_age, staleness_metrics, version_range
from spurline_rl.trajectory import Group, Trajectory, Turn, turns_of


def group_of(
    versions: Sequence[int] | None, mask: Sequence[int] | None = None, logprobs: Sequence[float] | None = None
) -> Group:
    count = 3 if versions is None else len(versions)
    turn = Turn(
        np.array([1]),
        np.arange(count),
        np.ones(count) if mask is None else np.array(mask),
        logprobs=None if logprobs is None else np.array(logprobs),
        versions=None if versions is None else np.array(versions),
    )
    return Group("u@0", 0, (Trajectory("u@0", 0, (turn,)),))


def test_tokens_are_counted_by_their_age_and_untrained_ones_not_at_all() -> None:
    metrics = staleness_metrics([group_of([5, 5, 4, 3]), group_of([1, 5], mask=[0, 1])], 5, 2, masked=0)
    assert [metrics[f"staleness/tokens_{age}"] for age in range(3)] == [3, 1, 1]
    assert metrics["staleness/mean"] == pytest.approx(3 / 5)
    assert metrics["staleness/max"] == 2


def test_a_trained_token_over_the_bound_is_a_broken_promise() -> None:
    with pytest.raises(AssertionError, match="bound 2"):
        staleness_metrics([group_of([2])], 5, 2, masked=0)


def test_a_token_of_weights_that_do_not_exist_yet_is_a_broken_promise() -> None:
    with pytest.raises(ValueError, match="negative"):
        staleness_metrics([group_of([6])], 5, 2, masked=0)


def test_masking_takes_the_loss_from_tokens_over_the_bound_alone() -> None:
    groups, masked = mask_over_age([group_of([1, 2, 3, 4], mask=[1, 1, 1, 0]), group_of([5])], 5, 2)
    assert masked == 2
    assert [turn.loss_mask.tolist() for turn in turns_of(groups)] == [[0, 0, 1, 0], [1]]
    assert staleness_metrics(groups, 5, 2, masked)["staleness/masked_tokens"] == 2
    young = [group_of([3, 4])]
    assert mask_over_age(young, 5, 2) == (young, 0)


def test_turns_without_versions_cannot_be_bounded() -> None:
    with pytest.raises(PluginError, match=r"no versions of its tokens.*policy\.finish"):
        staleness_metrics([group_of(None)], 5, 2, masked=0)


def test_the_versions_of_a_group_range_over_all_its_turns() -> None:
    assert version_range(group_of([4, 4, 7, 5])) == (4, 7)


def test_the_mismatch_of_fresh_tokens_leaves_out_older_and_untrained_ones() -> None:
    groups = [group_of([5, 4, 5], mask=[1, 1, 0], logprobs=[-1, -2, -3]), group_of([5, 5], logprobs=[-1, -1])]
    trainer = [np.array([-1.5, -9, -9], np.float32), np.array([-1, -1.25], np.float32)]
    assert fresh_mismatch(groups, trainer, 5) == {"mismatch/fresh": pytest.approx(0.25)}
    assert fresh_mismatch(groups, trainer, 6) == {}
    assert fresh_mismatch([group_of([5])], [np.array([-1], np.float32)], 5) == {}
