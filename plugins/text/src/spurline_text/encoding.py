"""Turn the rows of a dataset into samples: token ids with a loss mask, cut to length. A row may be left out.

Data flow: rows -> plain forms (formats) -> text and spans (chat) -> one batch encoding -> samples. The outcome
of a row never depends on other rows, so worker processes can divide the rows among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.data.token_store import EMPTY_ANSWER
from spurline.errors import DataError, ModelError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.chats.chat import ChatRenderer, TemplateRewritesHistory, is_doubtful, mask_of_spans
from spurline_text.chats.left_out import find_left_out, refuse_left_out
from spurline_text.rows.formats import Conversation, FormatName, Row, TextPair, TokenRow, format_of, read_row
from spurline_text.rows.rows import BadRowError, explain_bad_row, require_text
from spurline_text.token_bytes import Masked, Span, TokenBytes

MALFORMED_ROW = "malformed_row"
NO_LOSS_TOKENS = "no_loss_tokens"
NO_LOSS_TOKENS_AFTER_TRUNCATION = "no_loss_tokens_after_truncation"
TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
TOO_LONG = "too_long"


@dataclass(frozen=True)
class Sample:
    """A usable sample.

    Attributes:
        row: Number of the row in the dataset.
        tokens: Token ids [T].
        loss_mask: 1 for each token with loss, else 0 [T]. The first token never has loss.
        truncated: Whether the sample was cut to `max_length`.
        ignored: Kinds of content in the row that the chat template leaves out, and EMPTY_ANSWER if an answer is empty.
    """

    row: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    truncated: bool
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dropped:
    """A row without a sample, and the reason."""

    row: int
    reason: str


@dataclass(frozen=True)
class _Text:
    """A text to encode. If `ends` is true, an end-of-sequence token is added."""

    text: str
    spans: tuple[Span, ...]
    is_chat: bool
    ends: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedRows:
    """Rows that were read and rendered, with their texts. `error` is the error of the row after them, or None."""

    rows: Sequence[int]
    items: list[_Text | TokenRow | Dropped]
    error: Exception | None = None

    def texts(self, *, is_chat: bool) -> list[_Text]:
        return [item for item in self.items if isinstance(item, _Text) and item.is_chat == is_chat]


EncodedTexts = tuple[Sequence[Encoding], Sequence[Encoding]]
"""The encodings of the chats and of the plain texts in PreparedRows, in the order of the rows."""


class RowEncoder:
    """Encodes rows of one dataset."""

    def __init__(self, source: DatasetToTokenize, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        """Detect the format. Raises DataError if the columns fit no format, ModelError for a slow tokenizer."""
        self._dataset, self._config = source.dataset, source.config
        self._tokenizer = tokenizer
        self._data = data
        self._chat = ChatRenderer(tokenizer)
        self._vocabulary = len(tokenizer)
        require_offsets(tokenizer)
        self._token_bytes = TokenBytes(tokenizer) if TokenBytes.fits(tokenizer) else None
        self.format: FormatName = format_of(source)
        self._too_long = data.too_long or ("split" if self.format == "text" else "truncate")

    def encode(self, rows: Sequence[int]) -> list[Sample | Dropped]:
        """Return the samples and dropped rows, in row order. A long row may be cut into several samples.

        Raises DataError for the first bad row.
        """
        prepared = self.prepare(rows)
        return self.finish(prepared, self.encode_texts(prepared))

    def prepare(self, rows: Sequence[int]) -> PreparedRows:
        """Read and render rows, up to the first bad row. `finish` raises the error of the bad row."""
        items: list[_Text | TokenRow | Dropped] = []
        for row in rows:
            try:
                items.append(self._prepare(row))
            except Exception as error:  # noqa: BLE001 - `finish` raises it, after errors of the rows before it
                return PreparedRows(rows[: len(items)], items, error)
        return PreparedRows(rows, items)

    def encode_texts(self, prepared: PreparedRows) -> EncodedTexts:
        """Encode the texts, with one tokenizer call for chats and one for plain texts.

        This method uses only the tokenizer. One thread may call it while another thread prepares or finishes rows.
        Two threads must not call it at the same time.
        """
        chats = [item.text for item in prepared.texts(is_chat=True)]
        others = [item.text for item in prepared.texts(is_chat=False)]
        by_bytes = self._token_bytes
        encoded = encode_batch(self._tokenizer, chats, is_chat=True) if by_bytes is None else by_bytes.encode(chats)
        return encoded, encode_batch(self._tokenizer, others, is_chat=False)

    def _masked_chats(self, chats: Sequence[_Text], encodings: Sequence[Encoding]) -> list[Masked]:
        if self._token_bytes is None:
            return _by_offsets(chats, encodings)
        found = self._token_bytes.masked(encodings, [item.text for item in chats], [item.spans for item in chats])
        declined = [item for item, masked in zip(chats, found, strict=True) if masked is None]
        again = encode_batch(self._tokenizer, [item.text for item in declined], is_chat=True)
        others = iter(_by_offsets(declined, again))
        return [masked if masked is not None else next(others) for masked in found]

    def finish(self, prepared: PreparedRows, encoded: EncodedTexts) -> list[Sample | Dropped]:
        """Return the samples and dropped rows. Raises the error of the first bad row."""
        chats = iter(self._masked_chats(prepared.texts(is_chat=True), encoded[0]))
        others = iter(_by_offsets(prepared.texts(is_chat=False), encoded[1]))
        outcomes: list[Sample | Dropped] = []
        for row, item in zip(prepared.rows, prepared.items, strict=True):
            if isinstance(item, Dropped):
                outcomes.append(item)
            elif isinstance(item, TokenRow):
                tokens, mask = np.array(item.input_ids, np.int32), np.array(item.loss_mask, np.uint8)
                outcomes += self._finish(row, tokens, mask)
            else:
                tokens, mask = next(chats if item.is_chat else others)
                if item.ends:
                    tokens, mask = _end_with(self._tokenizer.eos_token_id, tokens, mask)
                outcomes += self._finish(row, tokens, mask, item.ignored)
        if prepared.error is not None:
            raise prepared.error
        return outcomes

    def _prepare(self, row: int) -> _Text | TokenRow | Dropped:
        skip = self._config.on_bad_row == "skip"
        try:
            values = self._dataset[row]
        except DataError:
            if skip:
                return Dropped(row, MALFORMED_ROW)
            raise
        try:
            return self._read(row, values)
        except TemplateRewritesHistory:
            return Dropped(row, TEMPLATE_REWRITES_HISTORY)
        except BadRowError as error:
            if skip:
                return Dropped(row, MALFORMED_ROW)
            raise explain_bad_row(self._dataset.location(row), error) from error

    def _read(self, row: int, values: Mapping[str, Any]) -> _Text | TokenRow:
        item: Row = read_row(values, self._config, self.format)
        if isinstance(item, TokenRow):
            self._check_vocabulary(item)
            return item
        if isinstance(item, TextPair):
            if item.ends and self._tokenizer.eos_token_id is None:
                raise ModelError(
                    f"the tokenizer {self._tokenizer.name_or_path} has no end-of-sequence token, so the model could "
                    "not learn where a completion ends. Set eos_token in its tokenizer_config.json."
                )
            text = item.prompt + item.completion
            require_text(text, values)
            # Only a completion with a prompt is an answer.
            empty = (EMPTY_ANSWER,) if item.prompt and not item.completion.strip() else ()
            return _Text(text, ((len(item.prompt), len(text)),), is_chat=False, ends=item.ends, ignored=empty)
        require_chat_template(self._tokenizer, self._dataset.location(row))
        rendered = self._chat.render_for_training(item, self._data.train_on)
        require_text(rendered.text, values)
        empty = (EMPTY_ANSWER,) if _has_empty_answer(item, self._data.train_on) else ()
        found = find_left_out(self._chat, item) if is_doubtful(item, rendered.text) else []
        if found and self._data.on_ignored == "error":
            refuse_left_out(found, self._tokenizer, self._dataset.location(row))
        ignored = (*empty, *dict.fromkeys(left_out.what for left_out in found))
        return _Text(rendered.text, rendered.spans, is_chat=True, ignored=ignored)

    def _check_vocabulary(self, item: TokenRow) -> None:
        largest = max(item.input_ids)
        if largest >= self._vocabulary:
            index = item.input_ids.index(largest)
            raise BadRowError(
                f"{item.field}[{index}]",
                f"is {largest}, but the tokenizer has only {self._vocabulary} tokens. Set model.tokenizer to the "
                "tokenizer that made the data.",
            )

    def _finish(
        self, row: int, tokens: NDArray[np.int32], mask: NDArray[np.uint8], ignored: tuple[str, ...] = ()
    ) -> Sequence[Sample | Dropped]:
        """Mask the first token, and drop, cut or refuse the sample by the settings `max_length` and `too_long`."""
        limit = self._data.max_length
        # Nothing precedes the first token, so nothing can predict it.
        mask[:1] = 0
        # This is faster than `any` for short arrays.
        if not np.count_nonzero(mask):
            return [Dropped(row, NO_LOSS_TOKENS)]
        if len(tokens) <= limit:
            return [Sample(row, tokens, mask, truncated=False, ignored=ignored)]
        if self._too_long == "split":
            pieces = _pieces(Sample(row, tokens, mask, truncated=False, ignored=ignored), limit)
            return pieces or [Dropped(row, NO_LOSS_TOKENS_AFTER_TRUNCATION)]
        if self._too_long == "error":
            raise DataError(
                f"{self._dataset.location(row)}: the sample has {len(tokens)} tokens, over data.max_length: {limit}. "
                "Raise data.max_length, or set data.too_long to truncate, split or drop."
            )
        if self._too_long == "drop":
            return [Dropped(row, TOO_LONG)]
        if not mask[:limit].any():
            return [Dropped(row, NO_LOSS_TOKENS_AFTER_TRUNCATION)]
        return [Sample(row, tokens[:limit], mask[:limit], truncated=True, ignored=ignored)]


def _has_empty_answer(conversation: Conversation, train_on: str) -> bool:
    """Return whether a trained turn is empty. From an empty turn, the model would learn only to end its answer."""
    trained = (conversation.messages[turn] for turn in conversation.trained_turns(train_on))
    # A turn with other keys, such as tool calls or reasoning, is not empty, since the template may write these.
    return any(turn.keys() <= {"role", "content"} and not str(turn.get("content") or "").strip() for turn in trained)


def _pieces(sample: Sample, limit: int) -> list[Sample]:
    """Cut a long sample into pieces of at most `limit` tokens, and leave out pieces without loss.

    Only the first piece has `ignored`, so that a row is counted once.
    """
    pieces: list[Sample] = []
    for start in range(0, len(sample.tokens), limit):
        mask = sample.loss_mask[start : start + limit].copy()
        # Nothing predicts the first token of a piece.
        mask[:1] = 0
        if mask.any():
            ignored = () if pieces else sample.ignored
            pieces.append(replace(sample, tokens=sample.tokens[start : start + limit], loss_mask=mask, ignored=ignored))
    return pieces


def _by_offsets(items: Sequence[_Text], encodings: Sequence[Encoding]) -> list[Masked]:
    return [
        (np.array(encoding.ids, np.int32), mask_of_spans(encoding, item.spans))
        for item, encoding in zip(items, encodings, strict=True)
    ]


def encode_batch(tokenizer: PreTrainedTokenizerBase, texts: list[str], is_chat: bool) -> list[Encoding]:
    """Return the `tokenizers.Encoding` of each text. Special tokens are added only to plain texts."""
    if not texts:
        return []
    batch = tokenizer(texts, add_special_tokens=not is_chat, return_attention_mask=False, verbose=False)
    assert batch.encodings is not None, "a fast tokenizer returns encodings"
    return batch.encodings


def require_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError for a tokenizer that cannot map tokens to characters."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} is a slow tokenizer, which does not "
            "return the characters of each token, so no loss mask can be made. Use a tokenizer with a tokenizer.json "
            "(model.tokenizer)."
        )


def require_chat_template(tokenizer: PreTrainedTokenizerBase, location: str) -> None:
    """Raise DataError if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{location}: chat rows need a chat template, and the tokenizer {tokenizer.name_or_path} has none. "
            "Give one with `model.chat_template: path/to/template.jinja`."
        )


def _end_with(end: Any, tokens: NDArray[np.int32], mask: NDArray[np.uint8]) -> Masked:
    if not len(tokens) or tokens[-1] != end:
        tokens, mask = np.append(tokens, np.int32(end)), np.append(mask, np.uint8(0))
    mask[-1] = 1
    return tokens, mask
