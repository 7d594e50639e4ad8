"""The age of tokens, what happens to those over the bound, and how far engines are from the trainer by age."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spurline.errors import PluginError
from spurline_async_rl.source.mismatch import MismatchByEngine
from spurline_async_rl.source.staleness import mask_over_age, staleness_metrics, version_range
from spurline_rl.trajectory import Group, Trajectory, Turn, turns_of


def group_of(
    versions: Sequence[int] | None, mask: Sequence[int] | None = None, logprobs: Any = None, **more: Any
) -> Group:
    count = 3 if versions is None else len(versions)
    turn = Turn(
        np.array([1]),
        np.arange(count),
        np.ones(count) if mask is None else np.array(mask),
        logprobs=logprobs,
        versions=None if versions is None else np.array(versions),
        **more,
    )
    return Group("u@0", 0, (Trajectory("u@0", 0, (turn,)),))


def test_tokens_are_counted_by_their_age_and_untrained_ones_not_at_all() -> None:
    metrics = staleness_metrics([group_of([5, 5, 4, 3]), group_of([1, 5], mask=[0, 1])], 5, 2, masked=0)
    assert [metrics[f"staleness/tokens_{age}"] for age in range(3)] == [3, 1, 1]
    assert metrics["staleness/mean"] == pytest.approx(3 / 5)
    assert metrics["staleness/max"] == 2


def test_a_trained_token_over_the_bound_or_of_weights_that_do_not_exist_yet_is_a_broken_promise() -> None:
    for version, error, words in ((2, AssertionError, "bound 2"), (6, ValueError, "negative")):
        with pytest.raises(error, match=words):
            staleness_metrics([group_of([version])], 5, 2, masked=0)


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
    trainer = np.array([-1.5, -9, -9, -1, -1.25], np.float32)
    assert MismatchByEngine().add(groups, trainer, 5) == {"mismatch/fresh": pytest.approx(0.25)}
    assert MismatchByEngine().add(groups, trainer, 6) == {}
    assert MismatchByEngine().add([group_of([5])], np.array([-1], np.float32), 5) == {}


def test_engines_are_compared_at_the_same_ages_over_several_steps() -> None:
    mismatch = MismatchByEngine()
    # Only engine 1 has fresh tokens, so it is not compared.
    groups = [
        group_of([5 - age] * 2, logprobs=[-1] * 2, engines=(f"engine {number} (process {process})",))
        for number, age, process in ((0, 1, 9), (1, 0, 9), (2, 1, 9), (2, 1, 10))
    ]

    def worst(*of_engine: float) -> list[float]:
        trainer = np.tile(np.repeat(-1 - np.array(of_engine, np.float32), 2), 11)
        found = mismatch.add(groups * 11, trainer, 5)
        return [found[name] for name in sorted(found) if "worst" in name]

    assert worst(0.02, 0.001, 0.02, 0.02) == []
    assert worst(0.02, 0.001, 0.02, 0.02)[2] == pytest.approx(1)
    # The processes of engine 2 count as one engine.
    mean, number, ratio = worst(0.02, 0.001, 0.32, 0.32)
    assert number == 2
    assert 0.1 < mean < 0.32
    assert ratio == pytest.approx(mean / 0.02)
