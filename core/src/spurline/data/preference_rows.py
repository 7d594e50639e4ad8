"""Read one side of preference rows (a prompt with a chosen and a rejected answer) as prompt and completion.

Place on the way: Dataset row -> `PreferenceSide` row -> formats -> encoding, so that any tokenization component reads
preference data without knowing it. Each dataset is read twice, once for each side.

| form | prompt | chosen, rejected |
|---|---|---|
| text | text | text |
| messages | messages, in `prompt` or `messages` | messages, or a single one |
| whole conversations | none, or its text | messages that begin alike; what they share is the prompt |
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Literal

from spurline.data.bad_row import BadRowError
from spurline.data.messages import Message, read_messages
from spurline.data.reading import check_rows
from spurline.data.row_view import RowView, unknown_column_problem
from spurline.errors import DataError
from spurline.protocols.dataset import Dataset
from spurline.protocols.tokenization import DatasetToTokenize

Side = Literal["chosen", "rejected"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")

# Part of the fingerprint, so that tokens cached by an older reading of the same rows are not served. Raise it with
# every change to what a row becomes.
_READING = 1


def side_of(source: DatasetToTokenize, side: Side) -> DatasetToTokenize:
    """One side of a preference dataset as one of prompts and completions. Raises DataError for unknown columns."""
    names = source.config.columns
    problem = unknown_column_problem(names)
    if problem is not None:
        raise DataError(f"{source.dataset.label}: {problem}")
    columns = {**names, "prompt": names.get("prompt", "prompt"), "completion": names.get(side, side)}
    config = source.config.model_copy(update={"format": "prompt_completion", "columns": columns})
    return DatasetToTokenize(PreferenceSide(source.dataset, side, dict(names)), config)


class PreferenceSide:
    """A `Dataset` with the rows of another, in which prompt and answer of one side are told apart.

    columns: the `columns` setting, expected name -> name in the file. The answer stays under its own name.
    """

    def __init__(self, dataset: Dataset, side: Side, columns: Mapping[str, str]) -> None:
        self.label = f"{dataset.label}/{side}"
        self._dataset = dataset
        self._side: Side = side
        self._columns = columns

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        values = self._dataset[row]
        view = RowView(values, self._columns)
        try:
            prompt, answer = _split(view, self._side)
        except BadRowError as error:
            raise error.at(self._dataset.location(row)) from error
        return {**values, view.label("prompt"): prompt, view.label(self._side): answer}

    def location(self, row: int) -> str:
        return self._dataset.location(row)

    def fingerprint(self) -> str:
        return f"{self._dataset.fingerprint()}/{self._side}/{_READING}"

    def check(self) -> None:
        check_rows(self._dataset)


def _split(view: RowView, side: Side) -> tuple[Any, Any]:
    """Prompt and answer of one side, both text or both messages where the row is well formed."""
    answers = {name: _as_list(view.require(name)) for name in SIDES}
    prompt = view.get("prompt")
    if prompt is None and "messages" in view:
        prompt = view.require("messages")
    if isinstance(answers[side], str) or (prompt is not None and not isinstance(prompt, str)):
        return (view.require("prompt") if prompt is None else prompt), answers[side]
    whole = {name: read_messages(answers[name], view.label(name)) for name in SIDES}
    shared = _num_shared(whole["chosen"], whole["rejected"])
    if shared:
        return whole[side][:shared], whole[side][shared:]
    if prompt is None:
        raise BadRowError(
            view.label("prompt"),
            f"is missing, and {view.label('chosen')} and {view.label('rejected')} begin with different messages. Give "
            "the messages before the answers in a column, and name it with `columns: {prompt: NAME}`.",
        )
    return [{"role": "user", "content": prompt}], whole[side]


def _as_list(answer: Any) -> Any:
    """A single message stands for a list of one."""
    return [answer] if isinstance(answer, Mapping) else answer


def _num_shared(chosen: list[Message], rejected: list[Message]) -> int:
    """Messages that both begin with; each keeps at least its last one as its answer."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
