"""Reward `prefix_match`: partial credit for an answer that begins right.

Where right answers are still rare, all attempts of a group fail alike and teach nothing; this tells them apart.
"""

from __future__ import annotations

from itertools import takewhile

from spurline.builtin.environment_configs import PrefixMatchConfig
from spurline.errors import DataError
from spurline.protocols.reward import Answer


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
