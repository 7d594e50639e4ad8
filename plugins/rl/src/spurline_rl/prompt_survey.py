"""Look at prompts before anything is generated: do their rows work, how long are they, what does the first look like.

Place on the way: rows in the order of the files -> the environment's first prompt -> a survey, for `spurline plan` and
for the check of lengths before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline_rl.draws import Draw, SkippedRow
from spurline_text.rows.rows import explain_bad_row

ROWS_BEFORE_TRAINING = 1_000
"""Rows of each dataset that are looked at before a run; the others are checked when they are drawn."""

_SHOWN_CHARACTERS = 800


@dataclass(frozen=True)
class PromptSurvey:
    """count: prompts looked at. tokens: of all of them. longest: tokens of the longest. where: the row of that one.
    first: token ids of the first prompt. first_where: its row. left_out: rows that `on_bad_row: skip` will leave out.
    """

    count: int
    tokens: int
    longest: int
    where: str
    first: Sequence[int]
    first_where: str
    left_out: int

    def lines(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The survey as text, with the first prompt as the model gets it."""
        left_out = f"; {self.left_out:,} rows will be left out" if self.left_out else ""
        text: Any = tokenizer.decode(list(self.first), skip_special_tokens=False)
        shown = str(text)
        if len(shown) > _SHOWN_CHARACTERS:
            half = _SHOWN_CHARACTERS // 2
            shown = f"{shown[:half]} [... {len(shown) - 2 * half:,} characters ...] {shown[-half:]}"
        return [
            f"{self.count:,} looked at, {self.tokens / self.count:.0f} tokens on average, longest {self.longest:,} "
            f"({self.where}){left_out}",
            f"the first, as the model gets it ({self.first_where}, {len(self.first):,} tokens):",
            *(f"  | {line}" for line in shown.splitlines()),
        ]


def survey(
    draws: Iterable[Draw | SkippedRow], first_prompt: Callable[[Draw], Sequence[int] | None]
) -> PromptSurvey | None:
    """Count the first prompts and their tokens, or return None if the environment does not know them beforehand.

    Raises:
        DataError: For a row that cannot be used.
    """
    count = tokens = longest = left_out = 0
    where = first_where = ""
    first: Sequence[int] = ()
    for draw in draws:
        if isinstance(draw, SkippedRow):
            left_out += 1
            continue
        try:
            ids = first_prompt(draw)
        except DataError as error:
            if draw.dataset.on_bad_row == "error":
                raise explain_bad_row(draw.location, error) from error
            left_out += 1
            continue
        if ids is None:
            return None
        if not count:
            first, first_where = ids, draw.location
        if len(ids) > longest:
            longest, where = len(ids), draw.location
        count, tokens = count + 1, tokens + len(ids)
    return PromptSurvey(count, tokens, longest, where, first, first_where, left_out) if count else None
