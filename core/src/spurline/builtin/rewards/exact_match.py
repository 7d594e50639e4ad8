"""Reward `exact_match`: the response is the reference, or it is not."""

from __future__ import annotations

from spurline.builtin.configs import ExactMatchConfig
from spurline.errors import DataError
from spurline.protocols.reward import Answer


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
