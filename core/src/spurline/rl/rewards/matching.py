"""Reward `exact_match`: the response is the reference, or it is not.

Reward `prefix_match`: partial credit for an answer that begins right.

Where right answers are still rare, all attempts of a group fail alike and teach nothing; this tells them apart.
"""

from __future__ import annotations

from itertools import takewhile

from spurline.errors import DataError
from spurline.protocols.reward import Answer
from spurline.rl.rewards.configs import ExactMatchConfig, PrefixMatchConfig


class ExactMatch:
    """1.0 for equal texts, else 0.0; white space at both ends does not count."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self._ignore_case = config.ignore_case

    def score(self, answer: Answer) -> float:
        if answer.reference is None:
            raise DataError(
                "exact_match needs a reference answer, but this row has none. Give it one, or name the column that "
                "holds it with `columns: {reference: NAME}`."
            )
        response, reference = answer.response.strip(), answer.reference.strip()
        if self._ignore_case:
            response, reference = response.casefold(), reference.casefold()
        return float(response == reference)

    async def score_async(self, answer: Answer) -> float:
        """Sooner done than a thread is started."""
        return self.score(answer)


class PrefixMatch:
    """Words before the first mistake over the words of the longer text: only the reference itself scores 1."""

    def __init__(self, config: PrefixMatchConfig) -> None:
        self.config = config

    def score(self, answer: Answer) -> float:
        if answer.reference is None:
            raise DataError(
                "prefix_match needs a reference answer, but this row has none. Give it one, or name the column that "
                "holds it with `columns: {reference: NAME}`."
            )
        expected, given = answer.reference.split(), answer.response.split()
        same = takewhile(lambda pair: pair[0] == pair[1], zip(expected, given, strict=False))
        longer = max(len(expected), len(given))
        return sum(1 for _ in same) / longer if longer else 1.0

    async def score_async(self, answer: Answer) -> float:
        """Sooner done than a thread is started."""
        return self.score(answer)
