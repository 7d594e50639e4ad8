"""What `spurline data` shows, taken from where training takes it: the batches of the first steps, or the first prompts.

The source of the run reads, tokenizes, orders and lays out; here its batches are only taken apart. No weights are
loaded. Which message a token belongs to is no part of a batch: conversations are rendered once more for that, and where
the rendering does not give the very tokens of the batch, no roles are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, Protocol, runtime_checkable
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from spurline.config.loading import LoadedConfig
from spurline.data.batch import TrainingBatch
from spurline.data.token_store import describe
from spurline.errors import DataError
from spurline.progress import Progress, silent
from spurline.protocols.source import DecoratedSource
from spurline.protocols.tokenization import DatasetToTokenize
from spurline.run.build import DataComponents, build_data
from spurline_text.chats.chat import ChatRenderer, TemplateRewritesHistory
from spurline_text.encoding import encode_batch
from spurline_text.rows.formats import Conversation, format_of, read_row
from spurline_text.rows.rows import BadRowError
from spurline_text.shown_pieces import shown
from spurline_text.token_pieces import TokenPieces
from spurline_text.tokenization import open_datasets, store_labels

ROW_LIMIT = 10_000
"""Rows of each dataset that are read unless all are asked for."""

Boundaries = list[tuple[str, int, int]]
"""Role of each message, its first token and the one after its last."""


@dataclass(frozen=True)
class ShownToken:
    """text: as of `shown_pieces.shown`, invisible characters as signs or escapes. weight: of its loss; 0 for a token
    that is not trained."""

    token_id: int
    text: str
    is_special: bool
    weight: float

    @property
    def is_trained(self) -> bool:
        return self.weight != 0


@dataclass(frozen=True)
class ShownPart:
    """Tokens of one message, or a run of tokens that are all trained or all not, where there are no messages."""

    role: str
    tokens: int
    trained: int


@dataclass(frozen=True)
class ShownSequence:
    """What the model sees as one. kind: sample, chosen, rejected or prompt. notes: what was cut or left out, and facts
    of its row."""

    uid: str
    kind: str
    tokens: tuple[ShownToken, ...]
    parts: tuple[ShownPart, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_trained(self) -> int:
        return sum(token.is_trained for token in self.tokens)


@dataclass(frozen=True)
class ShownRow:
    """A row of a batch with the sequences that share it. title: its place. length: with padding; 0 where prompts have
    none. left_out: sequences of the row that are not shown."""

    title: str
    sequences: tuple[ShownSequence, ...]
    length: int = 0
    left_out: int = 0

    @property
    def heading(self) -> str:
        """The title, with how full the row is, or how much of it is shown."""
        if not self.length:
            return self.title
        count = len(self.sequences)
        if self.left_out:
            return (
                f"{self.title}: {count} of the {count + self.left_out} sequences that share its {self.length:,} places"
            )
        used = sum(len(sequence.tokens) for sequence in self.sequences)
        shared = f"{count} sequences share it, " if count > 1 else ""
        return f"{self.title}: {shared}{used:,} of {self.length:,} places hold tokens"


@dataclass(frozen=True)
class ShownData:
    """name: of the run's config. facts: about all the data, with what was left out and why."""

    name: str
    facts: tuple[str, ...]
    rows: tuple[ShownRow, ...] = field(default=())

    @property
    def trains_on_it(self) -> bool:
        """Whether these tokens are what is trained, and no prompts whose answers will be."""
        return any(sequence.kind != "prompt" for row in self.rows for sequence in row.sequences)


def show_data(loaded: LoadedConfig, num_rows: int, row_limit: int | None, progress: Progress = silent) -> ShownData:
    """The first rows of the run. row_limit: rows of each dataset that are read; None reads all, as training does.

    Raises what building the data raises: DataError, ModelError, ConfigError.
    """
    with ExitStack() as stack:
        data = build_data(loaded, stack, row_limit, progress)
        rows = first_rows(loaded, data, num_rows)
        facts = describe("train", dict(data.source.summary()))
        for evaluation in data.evaluations:
            facts += describe(evaluation.label, dict(evaluation.held_out.summary()))
        if data.source.summary().get("read_in_part"):
            facts.append(
                f"read: the first {row_limit:,} rows of each dataset, so these rows come at another step of the run; "
                "--whole reads all"
            )
        if not rows:
            facts.append(
                f"nothing to show: the source '{loaded.config.source.name}' makes its batches while it trains, and "
                "tells no prompts beforehand"
            )
        return ShownData(str(loaded.origin), tuple(facts), tuple(rows))


def first_rows(loaded: LoadedConfig, data: DataComponents, num_rows: int) -> list[ShownRow]:
    """The first rows of the first batches, or the first prompts of a run that generates."""
    tokens = TokenPieces(data.context.tokenizer)
    if data.source.pure or data.source.reads_only_data:
        return _rows_of_batches(loaded, data, num_rows, tokens)
    rows: list[ShownRow] = []
    for number, prompt in enumerate(data.source.first_prompts(num_rows), start=1):
        shown_tokens = _tokens(prompt.token_ids, np.zeros(len(prompt.token_ids)), tokens)
        sequence = ShownSequence(prompt.uid, "prompt", shown_tokens, (), tuple(prompt.notes))
        rows.append(ShownRow(f"prompt {number}", (sequence,)))
    return rows


def _rows_of_batches(loaded: LoadedConfig, data: DataComponents, num_rows: int, pieces: TokenPieces) -> list[ShownRow]:
    """Return the first rows of batches with `num_rows` rows of the data; a packed row holds many."""
    rows: list[ShownRow] = []
    messages = _Messages(loaded, data)
    left = num_rows * max(1, len(messages.sides))
    for step in range(1, data.source.total_steps + 1):
        batch = data.source.build(step)
        for row in range(batch.num_rows):
            if left and not bool(batch.is_padding_row[row]):
                sequences = tuple(islice(_sequences(batch, row, pieces, messages), left))
                left -= len(sequences)
                title = f"step {step}, row {row + 1} of {batch.num_rows}"
                more = len(batch.segments["uid"][row]) - len(sequences)
                rows.append(ShownRow(title, sequences, batch.length, more))
        batch.release()
        if not left:
            break
    return rows


def _sequences(batch: TrainingBatch, row: int, pieces: TokenPieces, messages: _Messages) -> Iterator[ShownSequence]:
    columns = {name: column[row].numpy() for name, column in batch.tokens.items()}
    pairs = columns.get("pair_ids")
    for number, uid in enumerate(batch.segments["uid"][row].tolist(), start=1):
        places = np.flatnonzero(columns["segment_ids"] == number)
        ids, weights = columns["input_ids"][places], columns["loss_weights"][places]
        kind = "sample"
        if pairs is not None and messages.sides:
            kind = messages.sides[0 if pairs[places[0]] > 0 else 1]
        found = messages.of(uid, kind, ids)
        parts = _parts(weights, found.boundaries if found is not None else _runs(weights))
        notes: list[str] = []
        if found is not None and found.whole > len(ids):
            notes.append(f"cut to {len(ids):,} of {found.whole:,} tokens (data.max_length)")
        yield ShownSequence(uid, kind, _tokens(ids.tolist(), weights, pieces), parts, tuple(notes))


def _tokens(ids: Sequence[int], weights: NDArray[Any], pieces: TokenPieces) -> tuple[ShownToken, ...]:
    texts = shown(pieces.of(token_id) for token_id in ids)
    return tuple(
        ShownToken(token_id, _visible(text), pieces.is_special(token_id), weight)
        for token_id, text, weight in zip(ids, texts, weights.tolist(), strict=True)
    )


def _visible(text: str) -> str:
    """The end of a line gets a sign. Marks that turn the direction of text, or have no width, would make it look like
    other text."""
    text = text.replace("\n", "↵\n")
    if text.replace("↵", "").isascii():
        return text
    return "".join(ascii(sign)[1:-1] if category(sign) in ("Cf", "Zl", "Zp") else sign for sign in text)


def _parts(weights: NDArray[Any], boundaries: Boundaries) -> tuple[ShownPart, ...]:
    return tuple(
        ShownPart(role, stop - start, int(np.count_nonzero(weights[start:stop]))) for role, start, stop in boundaries
    )


def _runs(weights: NDArray[Any]) -> Boundaries:
    trained = weights != 0
    edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(weights)]
    return [
        ("trained" if trained[start] else "context", start, stop) for start, stop in pairwise(edges) if start < stop
    ]


@dataclass(frozen=True)
class _Found:
    """boundaries: of the messages, as far as the sample goes. whole: tokens before it was cut."""

    boundaries: Boundaries
    whole: int


@runtime_checkable
class ReadsPairs(Protocol):
    """A source that makes two sequences of a row, told apart by the sign of the column `pair_ids`."""

    sides: Sequence[str]
    """What the sequence of positive `pair_ids` is called, and the other one."""

    def side_of(self, source: DatasetToTokenize, side: str) -> DatasetToTokenize:
        """Return a dataset of pairs as one of the sequences of this side."""
        ...


class _Messages:
    """Which message each token of a conversation belongs to."""

    def __init__(self, loaded: LoadedConfig, data: DataComponents) -> None:
        self._loaded, self._context = loaded, data.context
        self._renderer = ChatRenderer(data.context.tokenizer)
        source = data.source
        while isinstance(source, DecoratedSource) and not isinstance(source, ReadsPairs):
            source = source.inner
        self._pairs = source if isinstance(source, ReadsPairs) else None
        self.sides: Sequence[str] = () if self._pairs is None else self._pairs.sides

    def of(self, uid: str, kind: str, ids: NDArray[np.int64]) -> _Found | None:
        """None for what is no conversation, and where the rendering is not what was trained."""
        label, _, row = uid.rpartition(":")
        source = self._sources(kind).get(label)
        if source is None:
            return None
        try:
            return self._find(source, int(row), ids)
        except (BadRowError, DataError, TemplateRewritesHistory):
            # Of such a row no token is trained either; of a stream rows are not numbered like this.
            return None

    def _sources(self, kind: str) -> Mapping[str, DatasetToTokenize]:
        return self._opened if kind not in self.sides else self._sides[kind]

    @cached_property
    def _opened(self) -> Mapping[str, DatasetToTokenize]:
        configs = self._loaded.config.data.train
        if any(config.streams for config in configs):
            return {}
        opened = open_datasets(configs, self._loaded.host.registry, self._context.row_limit)
        return dict(zip(store_labels(opened), opened, strict=True))

    @cached_property
    def _sides(self) -> Mapping[str, Mapping[str, DatasetToTokenize]]:
        assert self._pairs is not None
        side_of = self._pairs.side_of
        return {side: {label: side_of(source, side) for label, source in self._opened.items()} for side in self.sides}

    def _find(self, source: DatasetToTokenize, row: int, ids: NDArray[np.int64]) -> _Found | None:
        tokenizer = self._context.tokenizer
        has_template = tokenizer.chat_template is not None
        item = read_row(source.dataset[row], source.config, format_of(source), has_chat_template=has_template)
        if not isinstance(item, Conversation):
            return None
        text = self._renderer.render_for_training(item, self._loaded.config.data.train_on).text
        [encoding] = encode_batch(tokenizer, [text], is_chat=True)
        if encoding.ids[: len(ids)] != ids.tolist():
            return None
        starts = np.array([start for start, _ in encoding.offsets[: len(ids)]])
        boundaries: Boundaries = []
        first = 0
        for number, message in enumerate(item.messages, start=1):
            stop = len(ids)
            if number < len(item.messages):
                through = self._renderer.render(item.messages[:number], item.tools)
                if not text.startswith(through):
                    # The template writes this message otherwise where others follow: no place of its own is known.
                    continue
                stop = int(np.searchsorted(starts, len(through)))
            if stop > first:
                boundaries.append((str(message["role"]), first, stop))
            first = max(first, stop)
        return _Found(boundaries, len(encoding.ids))
