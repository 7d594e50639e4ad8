"""Reward `brief`: 1 for an empty response, falling to 0 at a number of characters.

It scores all answers that are finished at the same time in one call, as a reward with a model or a server would.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spurline_plugin_template.config import BriefConfig
from spurline_rl.protocols.reward import Answer


class BriefReward:
    """Scores answers by their length."""

    def __init__(self, config: BriefConfig) -> None:
        self._most = config.most_characters

    def score(self, answer: Answer) -> float:
        return self.score_many([answer])[0]

    def score_many(self, answers: Sequence[Answer]) -> list[float]:
        lengths = np.array([len(answer.response) for answer in answers])
        return (1 - np.minimum(lengths / self._most, 1)).tolist()
