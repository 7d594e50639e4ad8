"""Tokenization `parallel`: tokens from the cache, or made on all cores and kept there.

Place on the way: datasets -> cache key -> a cache entry; or blocks of samples -> SampleCollector -> memory or a new
entry. Core's RowEncoder decides what a row becomes, as for `text/sequential`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import date
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.data.token_store import SampleBlock, SampleSink, Tokenized
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.cache.folder import TokenCache, default_cache_folder
from spurline_collation_fast.cache.key import cache_key, prints_date
from spurline_collation_fast.configs import ParallelTokenizationConfig
from spurline_collation_fast.tokenization.block_encoder import BlockEncoder, Chunk, available_cores, chunks_of
from spurline_collation_fast.tokenization.worker_pool import TokenizationTask, UnsharableDataError, WorkerPool
from spurline_text.tokenization import SampleCollector, check_rows

ROWS_PER_CHUNK = 256
"""Rows that keep the threads of the tokenizer busy, unless they are short."""
MOST_ROWS_PER_CHUNK = 1024
TOKENS_PER_CHUNK = 1 << 16
"""Tokens of a chunk of short rows: the tokenizer's threads stand still for a moment after each chunk."""

WORKER_START_S = 2.2
"""Seconds until a worker encodes its first row: imports, the tokenizer, opening the data."""
CLEARLY_SOONER = 1.1
"""Workers must be faster by this factor: processes cost memory, and an estimate can be wrong."""
MEASURE_S = 0.5
"""Seconds for which the first rows are measured."""
MAX_WORKERS = 64
"""More workers gain nothing: one process collects the blocks of all of them."""

Advance = Callable[[int], None]


@contextmanager
def show_progress(num_rows: int) -> Iterator[Advance]:
    """Yield a function to call with each number of rows that are done. The bar goes when the work is done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenizing", total=num_rows)
        yield lambda rows: bar.advance(task, rows)


class ParallelTokenization:
    """Tokenizes datasets on all cores; equal to `text/sequential` sample by sample."""

    def __init__(
        self, config: ParallelTokenizationConfig, *, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config, self._tokenizer, self._data = config, tokenizer, data

    def tokenize(self, datasets: Sequence[DatasetToTokenize]) -> Tokenized:
        """Return all samples of all datasets, in order. No row is read when the cache has the tokens."""
        config = self._config
        if config.disable_cache:
            return self._in_memory(datasets)
        today = date.today()
        key = cache_key(datasets, self._tokenizer, self._data, today)
        try:
            cache = TokenCache(config.cache_dir or default_cache_folder())
            if prints_date(self._tokenizer):
                cache.notes.append(
                    "token cache: the chat template prints the date, so these tokens are for today's runs only."
                )
            if config.force_recache:
                cache.discard(key)
            elif (found := cache.open(key)) is not None:
                return replace(found, notes=(*found.notes, f"tokens read from the cache: {cache.folder / key.digest}"))
            cache.check_writable()
        # RuntimeError: there is no home directory.
        except (OSError, RuntimeError) as error:
            note = (
                f"token cache: it cannot be used ({error}), so the tokens stay in memory for this run. Set "
                "tokenization.cache_dir to another folder."
            )
            return self._in_memory(datasets, (note,))
        with cache.writer(key) as writer:
            collector, notes = self._encode(datasets, writer)
            if cache_key(datasets, self._tokenizer, self._data, today).digest != key.digest:
                names = ", ".join(item.dataset.label for item in datasets)
                raise DataError(f"{names}: the data changed while it was being tokenized. Run the same command again.")
            writer.finish(collector.findings())
            made = cache.commit(writer.folder, key)
        return replace(made, notes=(*made.notes, *notes))

    def _in_memory(self, datasets: Sequence[DatasetToTokenize], notes: Sequence[str] = ()) -> Tokenized:
        collector, more_notes = self._encode(datasets)
        return replace(collector.finish(), notes=(*notes, *more_notes))

    def _encode(
        self, datasets: Sequence[DatasetToTokenize], sink: SampleSink | None = None
    ) -> tuple[SampleCollector, list[str]]:
        """Send the samples of all rows to the sink, memory if None. Returns the counts, and notes for the user."""
        for dataset in datasets:
            check_rows(dataset.dataset)
        source = BlockSource(TokenizationTask(datasets, self._tokenizer, self._data), self._config.workers)
        collector = SampleCollector(datasets, sink)
        # Closed whatever happens here: an error must not leave worker processes behind.
        with show_progress(sum(source.sizes)) as advance, closing(source.blocks(advance)) as blocks:
            for block in blocks:
                collector.add(block)
        return collector, source.notes


class BlockSource:
    """Makes the blocks of all rows of a task; `notes` are lines for the user about how it went."""

    def __init__(self, task: TokenizationTask, workers: int | str) -> None:
        """Raises DataError for a dataset whose columns fit no format."""
        self._task, self._workers = task, workers
        self._encoder = BlockEncoder(task.datasets, task.tokenizer, task.data)
        self._encoder.check_formats()
        self.sizes = [len(source.dataset) for source in task.datasets]
        self._rows_per_chunk = ROWS_PER_CHUNK
        self.notes: list[str] = []

    def blocks(self, advance: Advance) -> Generator[SampleBlock, None, None]:
        """Yield the blocks of all rows in order; close it when leaving early.

        Where workers are allowed, the first rows are encoded here with the clock running, and the rest where that will
        be done sooner. `advance` is called with numbers of rows that are done.
        """
        chunks = self._chunks(0)
        done = 0
        if self._workers != 0:
            # The first chunk also compiles the template and starts threads; it says nothing about the others.
            for block in self._here(islice(chunks, 1), advance):
                done += block.num_rows
                yield block
            begin, begin_cpu, unmeasured = time.perf_counter(), time.process_time(), done
            for block in self._here(_for_seconds(chunks, MEASURE_S), advance):
                done += block.num_rows
                yield block
            left, measured = sum(self.sizes) - done, max(1, done - unmeasured)
            row_s, row_cpu_s = (time.perf_counter() - begin) / measured, (time.process_time() - begin_cpu) / measured
            most = min(available_cores(), MAX_WORKERS) if self._workers == "auto" else int(self._workers)
            workers = workers_worth_starting(left, row_s, row_cpu_s, most)
            if workers:
                try:
                    with WorkerPool(self._task, workers) as pool:
                        for block in pool.blocks(chunks_of(self.sizes, done, lambda: ROWS_PER_CHUNK)):
                            done += block.num_rows
                            advance(block.num_rows)
                            yield block
                except UnsharableDataError as error:
                    self._go_on_without(workers, error)
                chunks = self._chunks(done)
        yield from self._here(chunks, advance)

    def _go_on_without(self, workers: int, error: UnsharableDataError) -> None:
        """Say that the data stays here. Raises DataError where the config asks for worker processes."""
        if self._workers != "auto":
            raise DataError(
                f"tokenization.workers: {self._workers}: the data cannot be given to worker processes "
                f"({error}). Define the dataset in a module that can be imported and let it be pickled, or set "
                "tokenization.workers: 0."
            ) from error
        self.notes.append(
            f"tokenized in one process instead of {workers}: the data cannot be given to another one ({error})."
        )

    def _chunks(self, first: int) -> Iterator[Chunk]:
        return chunks_of(self.sizes, first, lambda: self._rows_per_chunk)

    def _here(self, chunks: Iterator[Chunk], advance: Advance) -> Generator[SampleBlock, None, None]:
        for block in self._encoder.blocks(chunks):
            advance(block.num_rows)
            rows = TOKENS_PER_CHUNK * block.num_rows // max(1, len(block.tokens))
            self._rows_per_chunk = min(max(ROWS_PER_CHUNK, rows), max(ROWS_PER_CHUNK, MOST_ROWS_PER_CHUNK))
            yield block


def workers_worth_starting(num_rows: int, row_s: float, row_cpu_s: float, most: int) -> int:
    """Return how many workers to start for so many rows; 0 when this process is done about as soon.

    Args:
        num_rows: Rows that are left.
        row_s: Seconds that a row takes in this process, with the threads of the tokenizer.
        row_cpu_s: Processor seconds of a row, all threads together. A worker has one thread.
        most: Workers at most.
    """
    workers = min(most, num_rows)
    # One alone is never sooner: this process has its start behind it.
    if workers < 2:
        return 0
    there_s = WORKER_START_S + num_rows * row_cpu_s / workers
    return workers if there_s * CLEARLY_SOONER < num_rows * row_s else 0


def _for_seconds(chunks: Iterator[Chunk], seconds: float) -> Iterator[Chunk]:
    """Yield chunks until the time is over; the rest stays in the iterator."""
    end = time.perf_counter() + seconds
    for chunk in chunks:
        yield chunk
        if time.perf_counter() >= end:
            return
