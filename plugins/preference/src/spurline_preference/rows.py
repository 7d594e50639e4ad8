"""Read rows of better and worse answers as prompts with completions.

| form of a row | prompt | chosen, rejected, or completion |
|---|---|---|
| text | text | text |
| turns as text | text, in `instruction` and, if there is one, `input` | text |
| messages | messages, in `prompt` or `messages` | messages, or a single message |
| whole conversations | none, or text | messages; the prompt comes first |
| whole texts | none | text of both answers, which begin with the same prompt |

In a pair, the first messages that both whole conversations share are the prompt. A single conversation is answered by
its last turn of the assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spurline.errors import DataError
from spurline.protocols.dataset import Dataset
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.rows.messages import Message, assistant_turns, read_messages
from spurline_text.rows.rows import BadRowError, RowView, describe
from spurline_text.tokenization import DerivedDataset

Side = Literal["chosen", "rejected", "completion"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")


def side_of(source: DatasetToTokenize, side: Side) -> DatasetToTokenize:
    """Return the answers of one column of a dataset as a dataset of prompts and completions."""
    names = source.config.columns
    columns = {**names, "prompt": names.get("prompt", "prompt"), "completion": names.get(side, side)}
    config = source.config.model_copy(update={"format": "prompt_completion", "columns": columns})
    return DatasetToTokenize(AnswersOfSide(source.dataset, side, dict(names)), config)


class AnswersOfSide(DerivedDataset):
    """A `Dataset` that wraps another dataset. Its rows have separate columns for the prompt and the answer of one side.

    `columns` is the dataset's setting `columns`. The answer stays in its original column.
    """

    def __init__(self, dataset: Dataset, side: Side, columns: Mapping[str, str]) -> None:
        super().__init__(dataset)
        self.label = f"{dataset.label}/{side}"
        self._side: Side = side
        self._columns = columns

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        values = self._dataset[row]
        view = RowView(values, self._columns)
        try:
            has_prompt = "prompt" in view or "messages" in view
            is_turn = "instruction" in self._columns or ("instruction" in view and not has_prompt)
            if self._side == "completion":
                # Check the label here, where a malformed row may be skipped.
                _label(view)
            prompt, answer = _split(view, self._side, is_turn=is_turn, num_texts=_num_texts(values))
        except BadRowError as error:
            raise error.at(self._dataset.location(row)) from error
        return {**values, view.label("prompt"): prompt, view.label(self._side): answer}

    def fingerprint(self) -> str:
        # Increase the last number when the code reads rows differently, so that tokens in older caches are not used.
        return f"{self._dataset.fingerprint()}/{self._side}/3"


class RowsAt(DerivedDataset):
    """The rows of a dataset with these numbers."""

    def __init__(self, dataset: Dataset, rows: NDArray[np.int64]) -> None:
        super().__init__(dataset)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._dataset[int(self._rows[row])]

    def location(self, row: int) -> str:
        return self._dataset.location(int(self._rows[row]))

    def fingerprint(self) -> str:
        return f"{self._dataset.fingerprint()}[{','.join(map(str, self._rows.tolist()))}]"


def has_labels(source: DatasetToTokenize) -> bool:
    """Return whether rows have a label instead of two answers. The first row that can be read decides.

    Raises:
        DataError: If it has neither.
    """
    dataset = source.dataset
    for row in range(len(dataset)):
        try:
            view = RowView(dataset[row], source.config.columns)
        except DataError:
            if source.config.on_bad_row == "error":
                raise
            continue
        if "label" in view:
            return True
        if all(side in view for side in SIDES):
            return False
        try:
            view.require("label")
        except BadRowError as error:
            raise error.at(dataset.location(row)) from error
    return True


def read_label(source: DatasetToTokenize, row: int) -> int:
    """Return 1 for a good and -1 for a bad answer. Raises DataError naming the row for a value that is no label."""
    try:
        return _label(RowView(source.dataset[row], source.config.columns))
    except BadRowError as error:
        raise error.at(source.dataset.location(row)) from error


def _label(view: RowView) -> int:
    value = view.require("label")
    # The values of a CSV file are text.
    found = {"true": 1, "1": 1, "1.0": 1, "false": -1, "0": -1, "0.0": -1}.get(str(value).strip().lower())
    if found is None:
        raise BadRowError(view.label("label"), f"is {describe(value)}, expected true or false, or 1 or 0.")
    return found


def _split(view: RowView, side: Side, *, is_turn: bool, num_texts: int) -> tuple[Any, Any]:
    """Return the prompt and the answer of one side. In a well-formed row both are text, or both are messages.

    If `is_turn` is True, the prompt is made of the columns `instruction` and `input`, and becomes a user turn. The row
    has text in `num_texts` columns.
    """
    sides = (side,) if side == "completion" else SIDES
    answers = {name: view.require(name) for name in sides}
    answers = {name: [answer] if isinstance(answer, Mapping) else answer for name, answer in answers.items()}
    answer, prompt = answers[side], view.get("prompt")
    if is_turn:
        prompt = view.instruction()
        if isinstance(answer, str):
            return [{"role": "user", "content": prompt}], [{"role": "assistant", "content": answer}]
    if prompt is None and "messages" in view:
        prompt = view.require("messages")
    if isinstance(answer, str) and prompt is None:
        # Another column with text may be the prompt.
        shared = _shared_text(answers) if num_texts == len(SIDES) else 0
        if shared == 0:
            view.require("prompt")
        return answer[:shared], answer[shared:]
    if isinstance(answer, str) or (prompt is not None and not isinstance(prompt, str)):
        return prompt, answer
    whole = {name: read_messages(answers[name], view.label(name)) for name in sides}
    shared = _shared_messages(whole, side, is_whole=prompt is None)
    if shared:
        return whole[side][:shared], whole[side][shared:]
    if prompt is None:
        names = " and ".join(map(view.label, sides))
        begins = f"{names} begins with the answer" if side == "completion" else f"{names} begin with different messages"
        raise BadRowError(
            view.label("prompt"),
            f"is missing, and {begins}. Give a column with the messages that come before the answers, and name it with "
            "`columns: {prompt: NAME}`.",
        )
    return [{"role": "user", "content": prompt}], whole[side]


def _shared_messages(whole: Mapping[str, list[Message]], side: Side, *, is_whole: bool) -> int:
    """Return how many messages come before the answer."""
    if side == "completion":
        turns = assistant_turns(whole[side])
        # Beside a prompt, the conversation may repeat the question, and everything after it is the answer.
        return 0 if not turns else turns[-1] if is_whole else turns[0]
    # The last message is the answer, so it is not compared.
    pairs = zip(whole["chosen"][:-1], whole["rejected"][:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shared_text(answers: Mapping[str, Any]) -> int:
    """Return the length of the text with which both answers begin, without a space at its end, as TRL reads such rows.

    Returns 0 if there is no such text.
    """
    texts = [answer for answer in answers.values() if isinstance(answer, str)]
    if len(texts) < len(SIDES):
        return 0
    equal = takewhile(lambda letters: letters[0] == letters[1], zip(*texts, strict=False))
    return len("".join(letter for letter, _ in equal).removesuffix(" "))


def _num_texts(row: Mapping[str, Any]) -> int:
    return sum(isinstance(value, str) for value in row.values())
