"""Turn chunks of rows into blocks of samples, in this process.

Place on the way: chunks -> RowEncoder, or token_columns for rows that are tokens already -> blocks. What a row becomes
is decided by core's RowEncoder, so that this gives what `core/sequential` gives; here it is only kept busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.data.encoding import RowEncoder
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.tokenization.chunks import Chunk, SampleBlock
from spurline_collation_fast.tokenization.token_columns import TokenColumns


class BlockEncoder:
    """Encodes chunks of the rows of several datasets."""

    def __init__(
        self, datasets: Sequence[DatasetToTokenize], tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._datasets, self._tokenizer, self._data = datasets, tokenizer, data
        self._encoders: dict[int, RowEncoder] = {}
        self._columns: dict[int, TokenColumns] = {}

    def check_formats(self) -> None:
        """Raise DataError for the first dataset whose columns fit no format."""
        for source in range(len(self._datasets)):
            self._encoder(source)

    def blocks(self, chunks: Iterable[Chunk]) -> Iterator[SampleBlock]:
        """The block of each chunk, in order. Datasets are touched by the calling thread only.

        While the tokenizer encodes one chunk on threads of its own, the rows of the next are read and rendered and
        the masks of the one before are made. The first row in order that is an error is the one raised.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="encode") as executor:
            finish: Callable[[], SampleBlock] | None = None
            for chunk in chunks:
                finish_next = self._start(chunk, executor)
                if finish is not None:
                    yield finish()
                finish = finish_next
            if finish is not None:
                yield finish()

    def _start(self, chunk: Chunk, executor: ThreadPoolExecutor) -> Callable[[], SampleBlock]:
        """Begin with a chunk; the result waits for it and gives its block, or raises its error."""
        encoder = self._encoder(chunk.source)
        columns = self._columns.get(chunk.source)
        block = columns.read(chunk) if columns is not None else None
        if block is not None:
            return lambda: block
        prepared = encoder.prepare(chunk.rows)
        encoded = executor.submit(encoder.encode_texts, prepared)
        # No time limit on the result: it is computed in this process and cannot get lost.
        return lambda: SampleBlock.of_outcomes(chunk.source, encoder.finish(prepared, encoded.result()))

    def _encoder(self, source: int) -> RowEncoder:
        if source not in self._encoders:
            dataset = self._datasets[source]
            self._encoders[source] = RowEncoder(dataset, self._tokenizer, self._data)
            if self._encoders[source].format == "pretokenized":
                self._columns[source] = TokenColumns(dataset, self._data, len(self._tokenizer))
        return self._encoders[source]
