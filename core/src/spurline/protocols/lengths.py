"""Describe the longest sequence in the data of a run, which is compared with the context length of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Longest:
    """The longest sequence in the data of a run.

    tokens: number of tokens of a sample, or of a prompt with the longest response. where: location of the row.
    setting: key path of the setting that bounds `tokens`. prompt_tokens: number of tokens of the prompt, after which
    up to `tokens - prompt_tokens` are generated; None for a sample.
    """

    tokens: int
    where: str
    setting: str
    prompt_tokens: int | None = None


class KnowsLongest(Protocol):
    """Data of a run whose longest sequence is known: a source, or an evaluation."""

    def longest(self) -> Longest | None:
        """Return the longest sequence in the data, which may be shorter than its limit; None if it is not known."""
        ...
