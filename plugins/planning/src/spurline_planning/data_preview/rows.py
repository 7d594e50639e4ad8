"""Return the first rows of a run as training sees them: from the batches of the first steps, or from the first prompts.

The run's source reads and tokenizes the rows, orders them and collates them into batches. This module splits batches
into single sequences. No weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from unicodedata import category

import numpy as np

from spurline.config.loading import LoadedConfig
from spurline.data.batch import TrainingBatch
from spurline.data.token_store import describe
from spurline.progress import Progress, silent
from spurline.run.build import DataComponents, build_data
from spurline_text.token_pieces import TokenPieces, shown

ROW_LIMIT = 10_000
"""Rows of each dataset that are read by default."""


@dataclass(frozen=True)
class ShownSequence:
    """Tokens that the model sees as one sequence.

    Attributes:
        uid: Id of the sample or prompt.
        kind: `sample` or `prompt`, or `chosen` or `rejected` for an answer of a preference pair.
        pieces: Text of each token, with symbols or escapes for invisible characters.
        weights: Loss weight of each token. A token is trained if its weight is not 0.
        special: Whether each token is a special token.
        notes: Remarks on the dataset row, one per line.
    """

    uid: str
    kind: str
    pieces: tuple[str, ...]
    weights: tuple[float, ...]
    special: tuple[bool, ...]
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Return a line with the kind and id, and if tokens are known, their number and the number of trained ones."""
        if self.kind == "prompt" and not self.pieces:
            return f"prompt {self.uid}"
        trained = f", {np.count_nonzero(self.weights):,} trained" if self.kind != "prompt" else ""
        return f"{self.kind} {self.uid}: {len(self.pieces):,} tokens{trained}"


@dataclass(frozen=True)
class ShownRow:
    """A row of a batch with the sequences that share it."""

    title: str
    sequences: tuple[ShownSequence, ...]


@dataclass(frozen=True)
class ShownData:
    """The first rows of a run, and facts about its data, such as the number of samples that were cut or left out."""

    facts: tuple[str, ...]
    rows: tuple[ShownRow, ...]


def show_data(loaded: LoadedConfig, num_rows: int, row_limit: int | None, progress: Progress = silent) -> ShownData:
    """Return the first rows of the run.

    Args:
        loaded: The config of the run.
        num_rows: Number of dataset rows to show. A packed row of a batch contains several dataset rows.
        row_limit: Maximum number of rows to read from each dataset. If None, all rows are read, as in training.
        progress: Called before each slow part.

    Raises:
        DataError: If a dataset or one of its rows cannot be used.
        ModelError: If the tokenizer cannot be loaded.
        ConfigError: If a setting does not fit the data.
    """
    with ExitStack() as stack:
        data = build_data(loaded, stack, row_limit, progress)
        rows = first_rows(data, num_rows)
        facts = facts_of(data)
        if data.source.summary().get("read_in_part"):
            facts.append(
                f"read: the first {row_limit:,} rows of each dataset. The run reads all rows, so it trains on these "
                "rows at other steps. --whole reads all rows here too"
            )
        if not rows:
            facts.append(
                f"nothing to show: the source '{loaded.config.source.name}' makes its batches during training, so its "
                "prompts are not known yet"
            )
        return ShownData(tuple(facts), tuple(rows))


def facts_of(data: DataComponents) -> list[str]:
    """Return lines about the training data, and about the data of each evaluation."""
    facts = describe("train", dict(data.source.summary()))
    for evaluation in data.evaluations:
        facts += describe(evaluation.label, dict(evaluation.held_out.summary()))
    return facts


def first_rows(data: DataComponents, num_rows: int) -> list[ShownRow]:
    """Return the first rows of the first batches, or the first prompts of a run that generates."""
    pieces = TokenPieces(data.context.tokenizer)
    if data.source.pure or data.source.reads_only_data:
        return _rows_of_batches(data, num_rows, pieces)
    rows: list[ShownRow] = []
    for number, prompt in enumerate(data.source.first_prompts(num_rows), start=1):
        weights = [0.0] * len(prompt.token_ids)
        sequence = _sequence(prompt.uid, "prompt", prompt.token_ids, weights, pieces, prompt.notes)
        rows.append(ShownRow(f"prompt {number}", (sequence,)))
    return rows


def _rows_of_batches(data: DataComponents, num_rows: int, pieces: TokenPieces) -> list[ShownRow]:
    rows: list[ShownRow] = []
    left = num_rows
    for step in range(1, data.source.total_steps + 1):
        batch = data.source.build(step)
        if step == 1 and "pair_ids" in batch.tokens:
            # A pair is one dataset row, but two sequences.
            left *= 2
        for row in range(batch.num_rows):
            if left and not bool(batch.is_padding_row[row]):
                sequences = tuple(islice(_sequences(batch, row, pieces), left))
                left -= len(sequences)
                rows.append(ShownRow(_title(batch, step, row, len(sequences)), sequences))
        batch.release()
        if not left:
            break
    return rows


def _title(batch: TrainingBatch, step: int, row: int, num_shown: int) -> str:
    place, count = f"step {step}, row {row + 1} of {batch.num_rows}", len(batch.segments["uid"][row])
    if num_shown < count:
        return f"{place}: {num_shown} of the {count} sequences that share its {batch.length:,} token positions"
    used = int((batch.tokens["segment_ids"][row] != 0).sum())
    shared = f"{count} sequences share it, " if count > 1 else ""
    return f"{place}: {shared}{used:,} of {batch.length:,} positions have tokens"


def _sequences(batch: TrainingBatch, row: int, pieces: TokenPieces) -> Iterator[ShownSequence]:
    columns = {name: column[row].numpy() for name, column in batch.tokens.items()}
    pairs = columns.get("pair_ids")
    for number, uid in enumerate(batch.segments["uid"][row].tolist(), start=1):
        places = np.flatnonzero(columns["segment_ids"] == number)
        kind = "sample"
        if pairs is not None:
            kind = "rejected" if pairs[places[0]] < 0 else "chosen"
        ids, weights = (columns[name][places].tolist() for name in ("input_ids", "loss_weights"))
        yield _sequence(uid, kind, ids, weights, pieces)


def _sequence(
    uid: str, kind: str, ids: Sequence[int], weights: Sequence[float], pieces: TokenPieces, notes: Sequence[str] = ()
) -> ShownSequence:
    texts = tuple(map(_visible, shown(map(pieces.of, ids))))
    special = tuple(map(pieces.is_special, ids))
    return ShownSequence(uid, kind, texts, tuple(weights), special, tuple(notes))


def _visible(text: str) -> str:
    """Return the text with ↵ at each line end, and with escapes for invisible and text-reversing characters."""
    text = text.replace("\n", "↵\n")
    if text.replace("↵", "").isascii():
        return text
    return "".join(ascii(sign)[1:-1] if category(sign) in ("Cf", "Zl", "Zp") else sign for sign in text)
