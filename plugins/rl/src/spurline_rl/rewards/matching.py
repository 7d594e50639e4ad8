"""Reward `exact_match`: compare the response with the row's reference answer."""

from __future__ import annotations

from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import ExactMatchConfig
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
        """Return the same as `score`, which takes less time than to start a thread."""
        return self.score(answer)
