"""Rewards `exact_match` and `prefix_match`: compare the response with the row's reference answer."""

from __future__ import annotations

from itertools import takewhile

from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import ExactMatchConfig, PrefixMatchConfig
from spurline_rl.rewards.references import required_reference


class ExactMatch:
    """1.0 for equal texts, else 0.0; white space at both ends does not count."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self._ignore_case = config.ignore_case

    def score(self, answer: Answer) -> float:
        response, reference = answer.response.strip(), required_reference(answer, "exact_match").strip()
        if self._ignore_case:
            response, reference = response.casefold(), reference.casefold()
        return float(response == reference)

    async def score_async(self, answer: Answer) -> float:
        """Sooner done than a thread is started."""
        return self.score(answer)


class PrefixMatch:
    """Words before the first mistake over the words of the longer text: only the reference itself scores 1.

    Where right answers are still rare, all attempts of a group fail alike and teach nothing; this tells them apart.
    """

    def __init__(self, config: PrefixMatchConfig) -> None:
        self.config = config

    def score(self, answer: Answer) -> float:
        expected, given = required_reference(answer, "prefix_match").split(), answer.response.split()
        same = takewhile(lambda pair: pair[0] == pair[1], zip(expected, given, strict=False))
        longer = max(len(expected), len(given))
        return sum(1 for _ in same) / longer if longer else 1.0

    async def score_async(self, answer: Answer) -> float:
        """Sooner done than a thread is started."""
        return self.score(answer)
