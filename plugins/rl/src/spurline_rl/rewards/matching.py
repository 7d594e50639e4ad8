"""Compare answers with the reference of their row. If a row has no reference, suggest the column that may hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spurline.errors import DataError
from spurline_rl.protocols.reward import Answer, RewardConfig
from spurline_rl.rewards.configs import ExactMatchConfig
from spurline_text.rows.usual_columns import guessed_reference


class ExactMatch:
    """A reward of 1.0 for equal texts, else 0.0. White space at both ends is ignored."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self._ignore_case = config.ignore_case

    async def score(self, answer: Answer) -> float:
        reference = required_reference("exact_match", answer.reference, answer.row).strip()
        response = answer.response.strip()
        if self._ignore_case:
            response, reference = response.casefold(), reference.casefold()
        return float(response == reference)


def check_reference(rewards: Mapping[str, RewardConfig], reference: str | None, row: Mapping[str, Any]) -> None:
    """Raise DataError if the row has no reference and one of the rewards needs it."""
    for config in rewards.values():
        if config.needs_reference:
            required_reference(config.name, reference, row)


def required_reference(name: str, reference: str | None, row: Mapping[str, Any]) -> str:
    """Return the reference. If the row has none, raise DataError with the name of the reward."""
    if reference is not None:
        return reference
    column = guessed_reference(row).get("reference", "NAME")
    raise DataError(
        f"{name} needs a reference answer, but this row has none. Give it one, or name the column that holds it with "
        f"`columns: {{reference: {column}}}`."
    )


def missing_reference(answer: Answer) -> str:
    """Return a hint for the error of a function if the reference may be in a column of another name, else ""."""
    column = guessed_reference(answer.row).get("reference")
    if answer.reference is not None or column is None:
        return ""
    return (
        f"answer.reference is None, because this row has no column `reference`. If `{column}` is meant, set "
        f"`columns: {{reference: {column}}}` of the dataset."
    )
