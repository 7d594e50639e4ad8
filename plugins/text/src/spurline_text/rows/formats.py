"""Detect the format of a row, and read the row into one of three forms.

Data flow: Dataset row -> Conversation, TextPair or TokenRow -> encoding. This module knows column names and
types, but no templates or tokenizers. The encoder checks that the token ids of a TokenRow are in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from spurline.errors import DataError, listing
from spurline.protocols.dataset import DatasetConfig
from spurline_text.rows.messages import Message, assistant_turns, read_messages, read_tools, with_system
from spurline_text.rows.rows import BadRowError, RowView, describe, unknown_column_problem
from spurline_text.rows.usual_columns import advice

if TYPE_CHECKING:
    from spurline.protocols.tokenization import DatasetToTokenize


IGNORED_LABEL = -100
"""Label of a token without loss, as in the Hugging Face libraries."""

_RULES = ("loss_mask", "labels")


@dataclass(frozen=True)
class TokenRow:
    """Token ids and loss mask (0 or 1), one entry per token. `field` is the column of the ids, for error messages."""

    input_ids: list[int]
    loss_mask: list[int]
    field: str


def read_token_row(view: RowView) -> TokenRow:
    """Return the tokens and loss mask. `loss_mask` has priority over `labels`. Raises BadRowError for a bad value."""
    field = view.label("input_ids")
    tokens = _integers(view.require("input_ids"), field)
    if not tokens:
        raise BadRowError(field, "is an empty list: a sample needs at least one token.")
    if min(tokens) < 0:
        raise BadRowError(f"{field}[{tokens.index(min(tokens))}]", f"is {min(tokens)}; token ids are not negative.")
    rule = next((rule for rule in _RULES if view.get(rule) is not None), None)
    if rule is None:
        raise BadRowError(
            field,
            f"needs another column that shows which tokens have loss. Add {' or '.join(map(view.label, _RULES))}.",
        )
    label = view.label(rule)
    values = _integers(view.require(rule), label)
    if len(values) != len(tokens):
        raise BadRowError(label, f"has {len(values)} entries, but {field} has {len(tokens)}. Give one entry per token.")
    if rule == "loss_mask":
        wrong = next((index for index, value in enumerate(values) if value not in (0, 1)), None)
        if wrong is not None:
            raise BadRowError(f"{label}[{wrong}]", f"is {describe(values[wrong])}, expected 0 or 1.")
        return TokenRow(tokens, values, field)
    for index, (wanted, token) in enumerate(zip(values, tokens, strict=True)):
        if wanted not in (IGNORED_LABEL, token):
            raise BadRowError(
                f"{label}[{index}]",
                f"is {wanted}, but {field}[{index}] is {token}. Labels are not shifted: each label equals the token at "
                f"the same position, or is {IGNORED_LABEL} for no loss.",
            )
    return TokenRow(tokens, [int(wanted != IGNORED_LABEL) for wanted in values], field)


def _integers(value: Any, field: str) -> list[int]:
    """Return a list of whole numbers. Booleans count as 0 and 1."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRowError(field, f"is {describe(value)}, expected a list of whole numbers.")
    if not set(map(type, value)) <= {int, bool}:
        index, item = next((index, item) for index, item in enumerate(value) if type(item) not in (int, bool))
        raise BadRowError(f"{field}[{index}]", f"is {describe(item)}, expected a whole number.")
    return list(map(int, value))


FormatName = Literal["chat", "alpaca", "prompt_completion", "pretokenized", "text"]

NEEDS: dict[FormatName, str] = {
    "pretokenized": "input_ids and one of loss_mask, labels",
    "chat": "messages (or conversations); optional system, tools",
    "prompt_completion": "prompt, completion",
    "alpaca": "instruction, output; optional input, system",
    "text": "text",
}
"""Columns that each format needs. `auto` tries the formats in this order."""

_SIGNATURES: tuple[tuple[FormatName, frozenset[str]], ...] = (
    ("pretokenized", frozenset({"input_ids"})),
    ("chat", frozenset({"messages"})),
    ("chat", frozenset({"conversations"})),
    ("prompt_completion", frozenset({"prompt", "completion"})),
    ("alpaca", frozenset({"instruction", "output"})),
    ("text", frozenset({"text"})),
)

ANSWER_COLUMNS = frozenset({"completion", "output"})


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template.

    Assistant turns at index `first_trained` and later have loss. If `first_trained` is None, `train_on` decides.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    first_trained: int | None = None

    def trained_turns(self, train_on: str) -> list[int]:
        """Return the indices of the messages with loss."""
        turns = assistant_turns(self.messages, self.first_trained or 0)
        return turns[-1:] if self.first_trained is None and train_on == "last_assistant" else turns


@dataclass(frozen=True)
class TextPair:
    """Plain text with loss on the completion. If `ends` is true, an end-of-sequence token with loss is added."""

    prompt: str
    completion: str
    ends: bool = True


def detect_format(config: DatasetConfig, row: Mapping[str, Any], *, needs_answer: bool = True) -> FormatName:
    """Return the format of a dataset, from its config or from the columns of `row`.

    If `needs_answer` is false, rows may lack the answer column. Raises a DataError that does not name the row.
    """
    if config.format != "auto":
        return config.format
    names = list(row)
    view = RowView(row, config.columns)
    # Formats with a column that the `columns` setting renames are tried first.
    for name, signature in sorted(_SIGNATURES, key=lambda item: item[1].isdisjoint(config.columns)):
        if all(column in view for column in (signature if needs_answer else signature - ANSWER_COLUMNS)):
            return name
    if "chosen" in view and "rejected" in view:
        raise DataError(f"the columns ({listing(names)}) are preference pairs. Set `source: preference`.")
    needs = "; ".join(f"{name}: {columns}" for name, columns in NEEDS.items())
    raise DataError(
        f"the columns ({listing(names)}) fit no format. Each format needs: {needs}. "
        f"{advice(row, needs_answer=needs_answer)}"
    )


def format_of(source: DatasetToTokenize) -> FormatName:
    """Return the format of a dataset, from its config or from the first row that can be read."""
    dataset, config = source.dataset, source.config
    problem = unknown_column_problem(config.columns)
    if problem is not None:
        raise DataError(f"{dataset.label}: {problem}")
    if config.format != "auto":
        return config.format
    for row in range(len(dataset)):
        try:
            values = dataset[row]
        except DataError:
            if config.on_bad_row == "error":
                raise
            continue
        try:
            return detect_format(config, values)
        except DataError as error:
            raise DataError(f"{dataset.location(row)}: {error}") from error
    raise DataError(f"{dataset.label}: no usable sample: none of its {len(dataset)} rows can be read.")


def read_row(row: Mapping[str, Any], config: DatasetConfig, name: FormatName, *, needs_answer: bool = True) -> Any:
    """Read a row of format `name` into a Conversation, a TextPair or a TokenRow.

    If `needs_answer` is false, a row may lack the answer. It then becomes a conversation that ends with a question, or
    a TextPair with an empty completion. Raises BadRowError, which names the field, for a malformed row.
    """
    view = RowView(row, config.columns)
    if name == "pretokenized":
        return read_token_row(view)
    if name == "chat":
        return _chat(view, needs_answer)
    if name == "text":
        if needs_answer:
            return TextPair("", view.text("text"), config.append_eos)
        raise BadRowError(
            view.label("text"),
            "is raw text, which has no question. To let the model continue it, name it as the prompt: "
            f"`columns: {{prompt: {view.label('text')}}}` and `format: prompt_completion`.",
        )
    if name == "alpaca":
        return _alpaca(view, needs_answer)
    return _prompt_completion(view, needs_answer)


def _chat(view: RowView, needs_answer: bool) -> Conversation:
    column = "messages" if "messages" in view or "conversations" not in view else "conversations"
    field = view.label(column)
    messages = read_messages(view.require(column), field)
    if needs_answer:
        _require_assistant(messages, field)
    return _conversation(view, messages)


def _conversation(view: RowView, messages: list[Message], first_trained: int | None = None) -> Conversation:
    tools = read_tools(view.get("tools"), view.label("tools"))
    complete = with_system(messages, view.get("system"), view.label("system"))
    added = len(complete) - len(messages)
    return Conversation(complete, tools, None if first_trained is None else first_trained + added)


def _alpaca(view: RowView, needs_answer: bool) -> Conversation:
    messages: list[Message] = [{"role": "user", "content": view.instruction()}]
    if needs_answer or view.get("output") is not None:
        messages.append({"role": "assistant", "content": view.text("output")})
    return _conversation(view, messages, first_trained=1)


def _prompt_completion(view: RowView, needs_answer: bool) -> Conversation | TextPair:
    prompt = view.require("prompt")
    prompt_field, completion_field = view.label("prompt"), view.label("completion")
    if not needs_answer and view.get("completion") is None:
        if isinstance(prompt, str):
            return TextPair(prompt, "")
        return _conversation(view, read_messages(prompt, prompt_field))
    completion = view.require("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return TextPair(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadRowError(
            completion_field,
            f"is {describe(completion)}, but {prompt_field} is {describe(prompt)}. "
            "Give text for both, or a list of messages for both.",
        )
    before = read_messages(prompt, prompt_field)
    after = read_messages(completion, completion_field)
    _require_assistant(after, completion_field)
    return _conversation(view, [*before, *after], first_trained=len(before))


def _require_assistant(messages: list[Message], field: str) -> None:
    if not assistant_turns(messages):
        raise BadRowError(field, "has no assistant turn: nothing to train on. Add one, or leave the row out.")


Row = Conversation | TextPair | TokenRow
