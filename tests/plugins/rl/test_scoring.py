"""Rewards on tokens: terms, weights, returns, the penalty on length, and which attempts have passed."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.errors import ConfigError, DataError, PluginError
from spurline_rl.evaluation_configs import HeldOutConfig, SuccessConfig, success_problems
from spurline_rl.held_out import deciding_term, has_passed
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.scoring import make_rewards, overlong_penalty, score, terms_of_all
from spurline_rl.trajectory import Group, Trajectory, Turn, has_equal_returns, trajectory_return


def make_turn(length: int, rewards: list[float] | None = None) -> Turn:
    arrays = {"rewards": rewards} if rewards is not None else {}
    return Turn(prompt_ids=[1, 2], response_ids=list(range(length)), loss_mask=[1] * length, **arrays)  # type: ignore[arg-type]


def rewards_of(trajectory: Trajectory) -> list[list[float]]:
    return [turn.rewards.tolist() for turn in trajectory.turns if turn.rewards is not None]


def attempt(*turns: Turn, **terms: float) -> Trajectory:
    return Trajectory("train:0@0", 0, turns, terms)


def test_weighted_terms_land_on_the_last_token_of_the_last_turn():
    scored = score(attempt(make_turn(2), make_turn(3), right=1.0, short=-4.0), {"short": 0.25})
    assert rewards_of(scored) == [[0, 0], [0, 0, 0]]
    scored = score(attempt(make_turn(2), make_turn(3), right=1.0, short=-4.0), {"short": 0.5})
    assert rewards_of(scored) == [[0, 0], [0, 0, -1]]
    assert scored.rewards == {"right": 1.0, "short": -4.0}, "terms are kept as they are, for the log"


def test_rewards_of_turns_are_kept_and_added_to():
    scored = score(attempt(make_turn(2, [0, 0.5]), make_turn(2, [0.25, 1]), right=2.0), {})
    assert rewards_of(scored) == [[0, 0.5], [0.25, 3]]


@given(
    turns=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    terms=st.dictionaries(st.sampled_from("abcd"), st.integers(-8, 8).map(float), max_size=4),
    data=st.data(),
)
def test_the_return_is_the_sum_of_turn_rewards_and_weighted_terms(turns, terms, data):
    weights = {name: data.draw(st.sampled_from([0.0, 0.5, 2.0])) for name in terms}
    own = [[float(number)] * length for number, length in enumerate(turns)]
    trajectory = attempt(*(make_turn(length, own[number]) for number, length in enumerate(turns)), **terms)
    expected = sum(map(sum, own)) + sum(weights[name] * value for name, value in terms.items())
    assert trajectory_return(score(trajectory, weights)) == expected


class FailsAtFirst:
    """Fails so many times."""

    def __init__(self, times: int) -> None:
        self._left = times

    def score(self, answer: Answer) -> float:
        self._left -= 1
        if self._left >= 0:
            raise TimeoutError("the judge does not answer")
        return 1.0


def test_an_answer_is_scored_again_as_often_as_allowed():
    answers = [Answer("", "text", None, {})]
    assert asyncio.run(terms_of_all({"value": FailsAtFirst(2)}, answers, retries=2)) == [{"value": 1.0}]
    with pytest.raises(AttemptFailedError, match="the judge does not answer"):
        asyncio.run(terms_of_all({"value": FailsAtFirst(3)}, answers, retries=2))


def test_answers_are_scored_together_by_a_reward_that_has_no_hash() -> None:
    @dataclass
    class Together:
        def score_many(self, answers: Sequence[Answer]) -> list[float]:
            return [float(len(answers))] * len(answers)

    answers = [Answer("", "text", None, {})] * 3
    assert asyncio.run(terms_of_all({"value": Together()}, answers)) == [{"value": 3.0}] * 3  # type: ignore[dict-item]


def test_the_line_of_a_failure_is_the_users_in_a_folder_that_has_our_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spurline_my_rewards"
    file = folder / "rewards.py"
    # A package of a plugin's author.
    monkeypatch.setitem(sys.modules, folder.name, cast(Any, SimpleNamespace(__path__=[str(folder)])))
    names: dict[str, Any] = {"json": json}
    exec(compile("def grade(answer):\n    json.loads(answer.response)", str(file), "exec"), names)
    reward: Any = SimpleNamespace(score=names["grade"])
    with pytest.raises(AttemptFailedError, match=re.escape(f" ({file}:2 in grade)")):
        asyncio.run(terms_of_all({"right": reward}, [Answer("", "text", None, {})]))


def test_a_plain_method_may_return_an_awaitable() -> None:
    class Hands:
        def score(self, answer: Answer) -> Awaitable[float]:
            return asyncio.sleep(0, 0.5)

    assert asyncio.run(terms_of_all({"value": Hands()}, [Answer("", "text", None, {})])) == [{"value": 0.5}]


def test_a_reward_that_scores_as_older_ones_did_is_refused() -> None:
    registry: Any = SimpleNamespace(create=lambda *_: SimpleNamespace(score_async=None))
    with pytest.raises(PluginError, match=r"reward 'right': .*rename `score_async` to `async def score`"):
        make_rewards({"right": None}, registry)  # type: ignore[dict-item]


def test_an_attempt_without_a_response_token_is_refused_because_its_reward_would_be_lost():
    with pytest.raises(AttemptFailedError, match=r"Sample 0 of prompt train:0@0 has no response token.*reward of 1 "):
        score(attempt(make_turn(0), right=1.0), {})


def test_a_weight_for_an_unknown_term_names_the_terms_there_are():
    with pytest.raises(ConfigError) as caught:
        score(attempt(make_turn(1), right=1.0, short=0.0), {"rigth": 2.0})
    assert "source.reward_weights.rigth is 'rigth', which is not a reward term" in str(caught.value)
    assert "Did you mean 'right'? Terms: right, short." in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_by_name(value):
    with pytest.raises(AttemptFailedError, match=f"Sample 0 of prompt train:0@0: reward 'right' is {value}"):
        score(attempt(make_turn(1), right=value), {})
    with pytest.raises(AttemptFailedError, match=r"turn 1: the rewards \[nan\] are not all finite"):
        score(attempt(make_turn(1), make_turn(1, [np.nan])), {})


def group(*samples: list[float]) -> Group:
    attempts = (
        Trajectory("uid", number, (make_turn(len(rewards), rewards),)) for number, rewards in enumerate(samples)
    )
    return Group("uid", 0, tuple(attempts))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reward_that_is_no_number_is_refused_with_sample_and_prompt(value: float) -> None:
    with pytest.raises(DataError, match=r"sample 1 of prompt 'uid' sum up to (nan|inf)"):
        _ = group([1.0], [0.0, value]).returns


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


def judged(terms: dict[str, float], turn_reward: float = 0.0) -> Trajectory:
    return score(attempt(make_turn(2, [0, turn_reward]), **terms), {})


@pytest.mark.parametrize("penalty", [0.0, -0.01, -5.0])
def test_a_penalty_never_turns_a_right_answer_into_a_wrong_one(penalty: float) -> None:
    success = HeldOutConfig(success=SuccessConfig(reward="right"))
    assert has_passed(judged({"right": 1.0, "short": penalty}), success)
    assert not has_passed(judged({"right": 0.0, "short": penalty}), success)


@pytest.mark.parametrize(
    ("terms", "turn_reward", "success", "passes"),
    [
        ({"right": 0.0, "style": 9.0}, 0.0, SuccessConfig(reward="right"), False),
        ({"share": 0.6}, 0.0, SuccessConfig(at_least=0.5), True),
        ({"share": 0.6}, 3.0, SuccessConfig(), False),
        ({}, 1.0, SuccessConfig(), True),
        ({}, 0.9, SuccessConfig(), False),
    ],
)
def test_the_named_or_only_term_decides_and_rewards_of_turns_where_there_is_none(terms, turn_reward, success, passes):
    assert has_passed(judged(terms, turn_reward), HeldOutConfig(success=success)) == passes


@pytest.mark.parametrize(
    ("success", "message"),
    [
        (SuccessConfig(), r"source\.held_out\.success does not say .* Terms: right, short\."),
        (SuccessConfig(reward="rihgt"), r"source\.held_out\.success\.reward is 'rihgt'.* Did you mean 'right'\?"),
    ],
)
def test_terms_that_only_attempts_tell_are_checked_with_the_first_of_them(success: SuccessConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deciding_term(judged({"right": 0.0, "short": 0.0}), HeldOutConfig(success=success))


def test_a_config_whose_environment_does_not_tell_its_terms_is_not_refused() -> None:
    assert list(success_problems(SuccessConfig(), None)) == []
    assert list(success_problems(SuccessConfig(), ["one"])) == []
    assert len(list(success_problems(SuccessConfig(), ["one", "two"]))) == 1
