"""Kind `reward`: score a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """What is scored.

    prompt: the prompt's text as the model saw it. response: the generated text, special tokens removed; in a
    conversation the model's last turn. reference: the expected text where the data has one. row: the dataset row.
    messages: the whole conversation, the model's turns included, where the environment holds one.
    """

    prompt: str
    response: str
    reference: str | None
    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()


class Reward(Protocol):
    """Score an answer.

    Factory: `Class(config)`. A reward that holds processes or files also has `close()`.
    """

    def score(self, answer: Answer) -> float:
        """A finite number, larger is better. Rollouts call it on a thread of its own, several at the same time."""
        ...


class ScoresOnLoop(Protocol):
    """A reward that needs no thread, because it awaits what it waits for, or is done at once.

    Rollouts then await this on the event loop instead of calling `score`.
    """

    async def score_async(self, answer: Answer) -> float:
        """The same number as `score`."""
        ...
