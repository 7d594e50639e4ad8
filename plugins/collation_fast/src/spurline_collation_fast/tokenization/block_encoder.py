"""Turn chunks of rows into blocks of samples, in this process.

Place on the way: chunks -> RowEncoder -> blocks. RowEncoder decides what a row becomes, as for `text/sequential`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.data.token_store import SampleBlock
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.encoding import RowEncoder
from spurline_text.tokenization import block_of_outcomes

_STARTED = 2
"""Chunks that the tokenizer is given before the first of them is waited for."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Chunk:
    """Rows [start, stop) of dataset number `source`, encoded together."""

    source: int
    start: int
    stop: int


def chunks_of(sizes: Sequence[int], first: int, rows_at_most: Callable[[], int]) -> Iterator[Chunk]:
    """Yield the rows of several datasets in order, each chunk within one dataset.

    Args:
        sizes: Rows of each dataset.
        first: The first row, counted from 0 over all datasets.
        rows_at_most: Asked for each chunk.
    """
    for source, size in enumerate(sizes):
        start = min(first, size)
        first -= start
        while start < size:
            stop = min(start + rows_at_most(), size)
            yield Chunk(source, start, stop)
            start = stop


class BlockEncoder:
    """Encodes chunks of the rows of several datasets; with `threads` a thread encodes while rows are read."""

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

    def check_formats(self) -> None:
        """Raise DataError for the first dataset whose columns fit no format."""
        for source in range(len(self._datasets)):
            self._encoder(source)

    def blocks(self, chunks: Iterable[Chunk]) -> Iterator[SampleBlock]:
        """Yield the block of each chunk, in order. Only the calling thread touches datasets.

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
        """Begin with a chunk; calling the result gives its block, or raises its error."""
        encoder = self._encoder(chunk.source)
        prepared = encoder.prepare(range(chunk.start, chunk.stop))
        if executor is None:
            return lambda: block_of_outcomes(chunk.source, encoder.finish(prepared, encoder.encode_texts(prepared)))
        encoded = executor.submit(encoder.encode_texts, prepared)
        # No time limit on the result: it is computed in this process and cannot get lost.
        return lambda: block_of_outcomes(chunk.source, encoder.finish(prepared, encoded.result()))

    def _encoder(self, source: int) -> RowEncoder:
        if source not in self._encoders:
            self._encoders[source] = RowEncoder(self._datasets[source], self._tokenizer, self._data)
        return self._encoders[source]
