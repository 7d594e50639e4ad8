"""Returns, equal returns, and the reward term of the length."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.errors import DataError
from spurline_rl.scoring import overlong_penalty
from spurline_rl.trajectory import Group, Trajectory, Turn, group_returns, has_equal_returns, trajectory_return


def turn(rewards: list[float]) -> Turn:
    array = np.array(rewards, dtype=np.float32)
    tokens = np.ones(len(array), dtype=np.int32)
    return Turn(tokens[:0], tokens, np.ones(len(array), np.uint8), rewards=array)


def group(*samples: list[float]) -> Group:
    trajectories = [Trajectory("uid", number, (turn(rewards),)) for number, rewards in enumerate(samples)]
    return Group("uid", 0, tuple(trajectories))


@given(st.lists(st.lists(st.floats(-10, 10, width=32), max_size=5), min_size=1, max_size=4))
def test_return_is_the_sum_of_all_rewards_of_all_turns(rewards: list[list[float]]) -> None:
    trajectory = Trajectory("uid", 0, tuple(turn(part) for part in rewards))
    assert trajectory_return(trajectory) == pytest.approx(math.fsum(value for part in rewards for value in part))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reward_that_is_no_number_is_refused_with_sample_and_prompt(value: float) -> None:
    with pytest.raises(DataError, match=r"sample 1 of prompt 'uid' sum up to (nan|inf)\. Make the reward function"):
        group_returns(group([1.0], [0.0, value]))


def test_samples_that_did_equally_well_have_equal_returns() -> None:
    assert has_equal_returns(group([1.0], [0.5, 0.5], [0.0, 1.0]))
    assert has_equal_returns(group([0.0], [0.0]))
    assert has_equal_returns(group([0.3], [0.1, 0.2]))
    assert not has_equal_returns(group([1.0], [1.0], [0.999]))
    assert not has_equal_returns(group([0.0], [1e-30]))


@given(num_tokens=st.integers(0, 300), longest=st.integers(1, 200), share=st.floats(0.01, 1))
def test_overlong_penalty_is_the_piecewise_line_of_dapo(num_tokens: int, longest: int, share: float) -> None:
    buffer = max(1, int(share * longest))
    if num_tokens <= longest - buffer:
        expected = 0.0
    elif num_tokens <= longest:
        expected = (longest - buffer - num_tokens) / buffer
    else:
        expected = -1.0
    assert overlong_penalty(num_tokens, longest=longest, buffer=buffer) == pytest.approx(expected, abs=1e-12)
