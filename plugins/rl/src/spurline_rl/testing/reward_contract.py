"""Check that a reward keeps its contract."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from spurline.errors import DataError
from spurline_rl.protocols.reward import Answer, Reward
from spurline_rl.scoring import reward_terms, terms_of_all

_ROW = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "level": 1}
_RESPONSES = ("4", "", "  4\n", "four", "The answer is 4.", "5", "-4.0", "\\boxed{4}", "4 4 4", "é 四 🙂", "x" * 20_000)


class RewardContract:
    """A test suite: define `make_reward()` in a subclass, and `answers()` if you need other rows or references.

    Attributes:
        is_deterministic: Whether equal answers get equal scores. Set it to False for a reward that asks a judge model.
    """

    is_deterministic = True

    def make_reward(self) -> Reward:
        raise NotImplementedError("subclass RewardContract with make_reward(self)")

    def answers(self) -> Sequence[Answer]:
        """Return answers to score: good, bad, empty and very long responses to one prompt, with a reference."""
        return [Answer("user: 2 + 2?", response, "4", _ROW, _ROW["messages"]) for response in _RESPONSES]

    @pytest.fixture
    def reward(self) -> Any:
        """Return your reward. It is closed twice at the end, because a run that fails may close it more than once."""
        made = self.make_reward()
        yield made
        for _ in range(2):
            if hasattr(made, "close"):
                made.close()  # type: ignore[attr-defined]

    def test_every_answer_gets_a_finite_number(self, reward: Reward) -> None:
        assert all(map(math.isfinite, scores(reward, self.answers())))

    def test_equal_answers_have_equal_scores(self, reward: Reward) -> None:
        if self.is_deterministic:
            answers = self.answers()
            assert scores(reward, answers) == scores(reward, copy.deepcopy(answers)[::-1])[::-1]

    def test_it_changes_nothing_of_an_answer_or_its_row(self, reward: Reward) -> None:
        answers = self.answers()
        untouched = copy.deepcopy(answers)
        scores(reward, answers)
        assert answers == untouched, "the reward changed an answer, or a row that all attempts share"

    def test_answers_that_are_scored_at_the_same_time_get_their_own_scores(self, reward: Reward) -> None:
        answers = [*self.answers()] * 3
        together = asyncio.run(asyncio.wait_for(terms_of_all({"mine": reward}, answers), 300))
        assert len(together) == len(answers)
        if self.is_deterministic:
            assert [terms["mine"] for terms in together] == scores(reward, self.answers()) * 3

    def test_an_answer_without_reference_is_scored_or_is_an_error_of_the_data(self, reward: Reward) -> None:
        with suppress(DataError):
            scores(reward, [replace(self.answers()[0], reference=None)])


def scores(reward: Reward, answers: Sequence[Answer]) -> list[float]:
    """Score the answers one after the other, as rollouts do."""

    async def score() -> list[float]:
        return [(await reward_terms({"mine": reward}, answer))["mine"] for answer in answers]

    return asyncio.run(score())
