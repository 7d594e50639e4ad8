"""Kind `reward`: score a response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """What is scored.

    prompt: the prompt's text as the model saw it. response: the generated text, special tokens removed.
    reference: the expected text where the data has one. row: the dataset row.
    """

    prompt: str
    response: str
    reference: str | None
    row: Mapping[str, Any]


class Reward(Protocol):
    """Score an answer.

    Factory: `Class(config)`.
    """

    def score(self, answer: Answer) -> float:
        """A finite number, larger is better."""
        ...
