"""Turn chunks of rows into blocks of samples, in this process.

Place on the way: chunks -> RowEncoder, or TokenColumns for rows that are tokens already -> blocks. What a row becomes
is decided by core's RowEncoder, so that this gives what `text/sequential` gives; here it is only kept busy.
TokenColumns follows the rules of RowEncoder and of `spurline_text.rows.formats` on whole Arrow columns.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.data.token_store import Count, SampleBlock
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.tokenization.chunks import Chunk
from spurline_text.encoding import NO_LOSS_TOKENS, NO_LOSS_TOKENS_AFTER_TRUNCATION, TOO_LONG, RowEncoder
from spurline_text.rows.formats import IGNORED_LABEL
from spurline_text.tokenization import arrow_rows, block_of_outcomes

_STARTED = 2
"""Chunks that the tokenizer is given before the first of them is waited for."""

if TYPE_CHECKING:
    import pyarrow


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BlockEncoder:
    """Encodes chunks of the rows of several datasets. threads: whether a thread encodes while rows are read."""

    def __init__(
        self,
        datasets: Sequence[DatasetToTokenize],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        threads: bool = True,
    ) -> None:
        self._datasets, self._tokenizer, self._data = datasets, tokenizer, data
        # On one core threads would only take turns.
        self._uses_thread = threads and available_cores() > 1
        self._encoders: dict[int, RowEncoder] = {}
        self._columns: dict[int, TokenColumns] = {}

    def check_formats(self) -> None:
        """Raise DataError for the first dataset whose columns fit no format."""
        for source in range(len(self._datasets)):
            self._encoder(source)

    def blocks(self, chunks: Iterable[Chunk]) -> Iterator[SampleBlock]:
        """The block of each chunk, in order. Datasets are touched by the calling thread only.

        While the tokenizer encodes one chunk on threads of its own, the rows of the next are read and rendered and
        the masks of the one before are made; another chunk is ready then, so that its threads never wait. The first row
        in order that is an error is the one raised.
        """
        if not self._uses_thread:
            for chunk in chunks:
                yield self._start(chunk, None)()
            return
        with ThreadPoolExecutor(1, thread_name_prefix="encode") as executor:
            started: deque[Callable[[], SampleBlock]] = deque()
            for chunk in chunks:
                started.append(self._start(chunk, executor))
                if len(started) > _STARTED:
                    yield started.popleft()()
            while started:
                yield started.popleft()()

    def _start(self, chunk: Chunk, executor: ThreadPoolExecutor | None) -> Callable[[], SampleBlock]:
        """Begin with a chunk; the result waits for it and gives its block, or raises its error. executor: encodes the
        texts meanwhile; None leaves that to the result."""
        encoder = self._encoder(chunk.source)
        columns = self._columns.get(chunk.source)
        block = columns.read(chunk) if columns is not None else None
        if block is not None:
            return lambda: block
        prepared = encoder.prepare(chunk.rows)
        if executor is None:
            return lambda: block_of_outcomes(chunk.source, encoder.finish(prepared, encoder.encode_texts(prepared)))
        encoded = executor.submit(encoder.encode_texts, prepared)
        # No time limit on the result: it is computed in this process and cannot get lost.
        return lambda: block_of_outcomes(chunk.source, encoder.finish(prepared, encoded.result()))

    def _encoder(self, source: int) -> RowEncoder:
        if source not in self._encoders:
            dataset = self._datasets[source]
            self._encoders[source] = RowEncoder(dataset, self._tokenizer, self._data)
            if self._encoders[source].format == "pretokenized":
                self._columns[source] = TokenColumns(dataset, self._data, len(self._tokenizer))
        return self._encoders[source]


Integers = NDArray[np.integer]
Mask = NDArray[np.uint8]


class _Unusual(Exception):  # noqa: N818 - a finding about a chunk, handled in this module
    """The chunk is RowEncoder's."""


@dataclass(frozen=True)
class _Ragged:
    """A list column: values end to end, and entries per row."""

    values: Integers
    lengths: NDArray[np.int64]


class TokenColumns:
    """Reads chunks of one dataset whose format is `pretokenized`. vocabulary: tokens the tokenizer has.

    It reports nothing: a chunk with anything out of the ordinary (nulls, other types, wrong lengths, ids outside the
    vocabulary, a sample that is an error) is declined, and RowEncoder says what is wrong.
    """

    def __init__(self, source: DatasetToTokenize, data: DataConfig, vocabulary: int) -> None:
        self._dataset, self._names = source.dataset, source.config.columns
        self._data = data
        self._vocabulary = vocabulary

    def read(self, chunk: Chunk) -> SampleBlock | None:
        """The chunk's samples; None when RowEncoder has to read it."""
        table = arrow_rows(self._dataset, chunk.start, chunk.stop)
        if table is None:
            return None
        try:
            ids = self._ids(table)
            mask = self._mask(table, ids)
            return self._block(chunk, ids, mask)
        except _Unusual:
            return None

    def _column(self, table: pyarrow.Table, name: str) -> pyarrow.Array | None:
        """A column without nulls; None when it is missing or holds nothing else."""
        label = self._names.get(name, name)
        if label not in table.column_names:
            # A name with dots may go into a column of objects.
            _require(label.partition(".")[0] not in table.column_names)
            return None
        column = table.column(label)
        if column.null_count == len(column):
            return None
        _require(column.null_count == 0)
        import pyarrow

        return column.chunk(0) if column.num_chunks == 1 else pyarrow.concat_arrays(column.chunks)

    def _ids(self, table: pyarrow.Table) -> _Ragged:
        column = self._column(table, "input_ids")
        if column is None:
            raise _Unusual
        ids = _ragged(column)
        _require(ids.lengths.min() > 0)
        _require(ids.values.min() >= 0 and ids.values.max() < self._vocabulary)
        return ids

    def _mask(self, table: pyarrow.Table, ids: _Ragged) -> Mask:
        """1 where the row says there is loss; the first of the columns that is there decides."""
        column = self._column(table, "loss_mask")
        if column is not None:
            given = _ragged(column, flags=True)
            _require(np.array_equal(given.lengths, ids.lengths))
            _require(given.values.min() >= 0 and given.values.max() <= 1)
            return given.values.astype(np.uint8)
        column = self._column(table, "labels")
        if column is not None:
            given = _ragged(column)
            _require(np.array_equal(given.lengths, ids.lengths))
            trained = given.values != IGNORED_LABEL
            _require(np.array_equal(given.values[trained], ids.values[trained]))
            return trained.astype(np.uint8)
        prompts = self._prompt_lengths(table, ids.lengths)
        _require(prompts.min() >= 0 and (prompts <= ids.lengths).all())
        return (_places(ids.lengths) >= np.repeat(prompts, ids.lengths)).astype(np.uint8)

    def _prompt_lengths(self, table: pyarrow.Table, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        column = self._column(table, "prompt_length")
        if column is not None:
            return _integers(column).astype(np.int64)
        column = self._column(table, "num_actions")
        if column is None:
            raise _Unusual
        return lengths - _integers(column).astype(np.int64)

    def _block(self, chunk: Chunk, ids: _Ragged, mask: Mask) -> SampleBlock:
        """Apply the rules of `RowEncoder` for the first token, for samples without loss and for `max_length`."""
        limit, starts = self._data.max_length, np.cumsum(ids.lengths) - ids.lengths
        mask[starts] = 0
        has_loss = np.maximum.reduceat(mask, starts) == 1
        long = ids.lengths > limit
        keep, cut, counts = has_loss, has_loss & long, []
        counts.append((NO_LOSS_TOKENS, ~has_loss))
        if cut.any():
            _require(self._data.too_long not in ("error", "split"))
            inside = _places(ids.lengths) < limit
            if self._data.too_long == "drop":
                counts.append((TOO_LONG, cut))
                keep = keep & ~long
            else:
                hopeless = cut & (np.maximum.reduceat(mask * inside, starts) == 0)
                counts.append((NO_LOSS_TOKENS_AFTER_TRUNCATION, hopeless))
                counts.append(("", cut & ~hopeless))
                keep = keep & ~hopeless
            chosen = np.repeat(keep, ids.lengths) & inside
        else:
            chosen = np.repeat(keep, ids.lengths)
        everything = bool(chosen.all())
        return SampleBlock(
            source=chunk.source,
            num_rows=len(chunk),
            tokens=(ids.values if everything else ids.values[chosen]).astype(np.int32),
            loss_mask=mask if everything else mask[chosen],
            lengths=np.minimum(ids.lengths[keep], limit),
            rows=np.arange(chunk.start, chunk.stop, dtype=np.int64)[keep],
            counts=_counts(counts, chunk.start),
        )


def _counts(fates: list[tuple[str, NDArray[np.bool_]]], first_row: int) -> tuple[Count, ...]:
    """Counts of the fates that some row met, by their first row."""
    met = [Count(reason, int(rows.sum()), first_row + int(rows.argmax())) for reason, rows in fates if rows.any()]
    return tuple(sorted(met, key=lambda count: count.first_row))


def _ragged(column: pyarrow.Array, *, flags: bool = False) -> _Ragged:
    import pyarrow

    if not isinstance(column, (pyarrow.ListArray, pyarrow.LargeListArray)):
        raise _Unusual
    offsets = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    # Not `flatten`, which copies: the values of this slice, in place.
    values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    return _Ragged(_integers(values, flags=flags), np.diff(offsets))


def _integers(column: pyarrow.Array, *, flags: bool = False) -> Integers:
    """Whole numbers, or also booleans where they stand for 0 and 1."""
    import pyarrow

    is_flag = flags and pyarrow.types.is_boolean(column.type)
    _require(is_flag or (pyarrow.types.is_integer(column.type) and column.type != pyarrow.uint64()))
    _require(column.null_count == 0)
    values = column.to_numpy(zero_copy_only=False)
    return values.astype(np.uint8) if is_flag else values


def _places(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2, ... within each row."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


def _require(usual: object) -> None:
    if not usual:
        raise _Unusual
