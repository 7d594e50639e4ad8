"""What an answer is compared with, and what to say where its row has none: most often another column holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spurline.data.rows.usual_columns import guessed_reference
from spurline.errors import DataError
from spurline.protocols.reward import Answer


def required_reference(answer: Answer, name: str) -> str:
    """The reference, for the reward of this name. Raises DataError where the row has none."""
    if answer.reference is not None:
        return answer.reference
    raise no_reference(name, answer.row)


def no_reference(name: str, row: Mapping[str, Any], where: str = "") -> DataError:
    """The error of a row without a reference, which the reward of this name needs. where: begins it."""
    column = guessed_reference(row).get("reference", "NAME")
    return DataError(
        f"{where}{name} needs a reference answer, but this row has none. Give it one, or name the column that holds it "
        f"with `columns: {{reference: {column}}}`."
    )


def missing_reference(answer: Answer) -> str:
    """What to add to the failure of a function that may have asked for a reference; empty where that is unlikely."""
    column = guessed_reference(answer.row).get("reference")
    if answer.reference is not None or column is None:
        return ""
    return (
        f"answer.reference is None, as this row has no column `reference`; if `{column}` is meant, set "
        f"`columns: {{reference: {column}}}` of the dataset."
    )
