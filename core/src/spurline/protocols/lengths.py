"""The longest sequence that the data of a run makes, which is compared with what its model can see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Longest:
    """The longest sequence that the data makes.

    tokens: of a sample, or of a prompt with a whole response. where: its row. prompt_tokens: of the prompt, where a
    response of up to `tokens - prompt_tokens` follows; None for a sample. setting: key path of what bounds `tokens`.
    """

    tokens: int
    where: str
    setting: str
    prompt_tokens: int | None = None


class KnowsLongest(Protocol):
    """Data of a run whose longest sequence is known: a source, or an evaluation."""

    def longest(self) -> Longest | None:
        """Return the longest sequence that there really is; None where that is not known."""
        ...
