"""Which attempts have passed: judged by one named reward, never by the weighted sum."""

from __future__ import annotations

import pytest
from rl_attempts import make_policy, run, says

from spurline.errors import ConfigError
from spurline_rl.configs import SuccessConfig, success_problems
from spurline_rl.held_out import deciding_term, has_passed
from spurline_rl.scoring import score
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Trajectory
from spurline_text.testing.inputs import tiny_tokenizer


def attempt(rewards: dict[str, float], turn_reward: float = 0.0) -> Trajectory:
    """A scored attempt of one turn."""
    tokenizer = tiny_tokenizer()
    policy = make_policy(ScriptedEngine(says(tokenizer, "1 2 3")))

    async def make() -> Trajectory:
        await policy.generate([5, 6, 7])
        return policy.finish(rewards, turn_rewards=[turn_reward])

    return score(run(make()), {})


@pytest.mark.parametrize("penalty", [0.0, -0.01, -5.0])
def test_a_penalty_never_turns_a_right_answer_into_a_wrong_one(penalty: float) -> None:
    success = SuccessConfig(reward="right")
    assert has_passed(attempt({"right": 1.0, "short": penalty}), success)
    assert not has_passed(attempt({"right": 0.0, "short": penalty}), success)


def test_a_bonus_never_turns_a_wrong_answer_into_a_right_one() -> None:
    assert not has_passed(attempt({"right": 0.0, "style": 9.0}), SuccessConfig(reward="right"))


def test_the_only_term_decides_where_none_is_named() -> None:
    assert has_passed(attempt({"share": 0.6}), SuccessConfig(at_least=0.5))
    assert not has_passed(attempt({"share": 0.6}), SuccessConfig())


def test_rewards_of_turns_do_not_count_towards_the_only_term() -> None:
    assert not has_passed(attempt({"share": 0.6}, turn_reward=3.0), SuccessConfig())


def test_rewards_of_turns_decide_where_an_environment_names_no_term() -> None:
    assert has_passed(attempt({}, turn_reward=1.0), SuccessConfig())
    assert not has_passed(attempt({}, turn_reward=0.9), SuccessConfig())


@pytest.mark.parametrize(
    ("success", "message"),
    [
        (SuccessConfig(), r"source\.held_out\.success does not say .* Terms: right, short\."),
        (SuccessConfig(reward="rihgt"), r"source\.held_out\.success\.reward is 'rihgt'.* Did you mean 'right'\?"),
    ],
)
def test_terms_that_only_attempts_tell_are_checked_with_the_first_of_them(success: SuccessConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deciding_term(["right", "short"], success)


def test_a_config_whose_environment_does_not_tell_its_terms_is_not_refused() -> None:
    assert list(success_problems(SuccessConfig(), None)) == []
    assert list(success_problems(SuccessConfig(), ["one"])) == []
    assert len(list(success_problems(SuccessConfig(), ["one", "two"]))) == 1
