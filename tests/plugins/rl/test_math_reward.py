"""Reward `math_verify`: compares as mathematics, and is wrong in time where it cannot."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from rl_attempts import run

from spurline.errors import ConfigError, DataError
from spurline_concurrency.killable import KillablePool
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import MathVerifyConfig
from spurline_rl.rewards.math_verify import MathVerify
from spurline_rl.scoring import reward_terms


def test_without_the_library_the_reward_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the math-verify library.*pip install 'spurline-rl\[math\]'"):
        MathVerify(MathVerifyConfig())


@pytest.fixture
def math_reward() -> Iterator[MathVerify]:
    pytest.importorskip("math_verify")
    reward = MathVerify(MathVerifyConfig(timeout_s=60.0))
    yield reward
    reward.close()


@pytest.mark.slow
def test_answers_are_compared_as_mathematics(math_reward):
    cases = [("1/2", "so it is \\boxed{0.5}", 1), ("\\frac{1}{2}", "$\\frac{2}{4}$", 1), ("42", "The answer is 42.", 1)]
    cases += [("42", "The answer is 41.", 0), ("x^2", "", 0), ("$(1, 2)$", "$(1,2)$", 1)]
    for reference, response, expected in cases:
        answer = Answer("", response, reference, {})
        assert run(reward_terms({"math": math_reward}, answer)) == {"math": expected}, (reference, response)


@pytest.mark.slow
def test_a_reference_without_mathematics_is_the_datas_fault(math_reward):
    with pytest.raises(DataError, match="finds no mathematics in the reference ''"):
        run(math_reward.score(Answer("", "42", "", {})))
    with pytest.raises(DataError, match="needs a reference"):
        run(math_reward.score(Answer("", "42", None, {})))


@pytest.mark.processes
def test_an_answer_that_cannot_be_checked_in_time_is_wrong(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    reward = MathVerify(MathVerifyConfig())
    reward._pool = KillablePool("reward_functions:compares_for_ever", 0.2, workers=1)
    try:
        assert run(reward.score(Answer("", "10^10^10", "1", {}))) == 0.0
    finally:
        reward.close()
