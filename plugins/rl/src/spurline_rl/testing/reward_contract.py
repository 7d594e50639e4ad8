"""Check that a reward keeps its contract."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from spurline.errors import DataError
from spurline_rl.protocols.reward import Answer, Reward
from spurline_rl.scoring import checked_score, reward_terms

_ROW = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "level": 1}
_RESPONSES = ("4", "", "  4\n", "four", "The answer is 4.", "5", "-4.0", "\\boxed{4}", "4 4 4", "é 四 🙂", "x" * 20_000)
_CALLERS = 8


class RewardContract:
    """Subclass with `make_reward()`, and `answers()` when it needs rows or references of its own.

    Attributes:
        is_deterministic: Whether equal answers have equal scores; set it to False for one that asks a judge.
    """

    is_deterministic = True

    def make_reward(self) -> Reward:
        """Return your reward."""
        raise NotImplementedError("subclass RewardContract with make_reward(self)")

    def answers(self) -> Sequence[Answer]:
        """Return answers to score: good, bad, empty and very long responses to one prompt, with a reference."""
        return [Answer("user: 2 + 2?", response, "4", _ROW, _ROW["messages"]) for response in _RESPONSES]

    @pytest.fixture
    def reward(self) -> Any:
        """Return your reward. It is closed twice at the end, as a run that fails may close more than once."""
        made = self.make_reward()
        yield made
        for _ in range(2):
            if hasattr(made, "close"):
                made.close()  # type: ignore[attr-defined]

    def test_every_answer_gets_a_finite_number(self, reward: Reward) -> None:
        for answer in self.answers():
            assert math.isfinite(checked_score("mine", reward.score(answer), answer))

    def test_equal_answers_have_equal_scores(self, reward: Reward) -> None:
        if self.is_deterministic:
            answers = self.answers()
            again = [reward.score(copy.deepcopy(answer)) for answer in answers[::-1]][::-1]
            assert [reward.score(answer) for answer in answers] == again

    def test_it_changes_nothing_of_an_answer_or_its_row(self, reward: Reward) -> None:
        for answer in self.answers():
            untouched = copy.deepcopy(answer)
            reward.score(answer)
            assert answer == untouched, "the row belongs to all attempts at it"

    def test_many_callers_at_the_same_time_get_their_own_scores(self, reward: Reward) -> None:
        answers = list(self.answers())
        with ThreadPoolExecutor(_CALLERS) as callers:
            together = list(callers.map(reward.score, answers * 3, timeout=300))
        assert len(together) == 3 * len(answers)
        if self.is_deterministic:
            assert together == [reward.score(answer) for answer in answers] * 3

    def test_rollouts_get_the_same_scores_as_direct_callers(self, reward: Reward) -> None:
        async def score() -> list[float]:
            return [(await reward_terms({"mine": reward}, answer))["mine"] for answer in self.answers()]

        scores = asyncio.run(asyncio.wait_for(score(), 300))
        if self.is_deterministic:
            assert scores == [float(reward.score(answer)) for answer in self.answers()]

    def test_an_answer_without_reference_is_scored_or_is_an_error_of_the_data(self, reward: Reward) -> None:
        answer = replace(self.answers()[0], reference=None)
        try:
            value = reward.score(answer)
        except DataError:
            return
        except Exception as error:
            raise AssertionError(f"raise DataError for a row without reference, not {error!r}") from error
        checked_score("mine", value, answer)
