"""Tokenization `parallel`: tokens from the cache, or made on all cores and kept there.

Place on the way: datasets -> cache key -> a cache entry; or blocks of samples -> SampleCollector -> memory or a new
entry. What a row becomes is decided by core's RowEncoder, as for `text/sequential`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.data.token_store import SampleBlock, SampleSink, Tokenized
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.cache.folder import NoHomeError, TokenCache, default_cache_folder
from spurline_collation_fast.cache.key import cache_key, prints_date
from spurline_collation_fast.cache.layout import CacheKey
from spurline_collation_fast.configs import ParallelTokenizationConfig
from spurline_collation_fast.tokenization.block_encoder import BlockEncoder
from spurline_collation_fast.tokenization.chunks import Chunk, RowLine
from spurline_collation_fast.tokenization.slice_worker import SliceTask, UnsharableDataError
from spurline_collation_fast.tokenization.slice_workers import SliceWorkers
from spurline_collation_fast.tokenization.worker_choice import (
    CLEARLY,
    MAX_WORKERS,
    MEASURE_S,
    CostMeter,
    RowCost,
    for_seconds,
    idle_cores,
    rows_while_they_start,
    slices_worth_a_start,
    workers_worth_starting,
)
from spurline_text.tokenization import SampleCollector, check_rows


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} rows/s" if task.speed else "")


@contextmanager
def show_progress(num_rows: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to be called with each number of rows that are done. The bar goes when the work is done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
        _RowsPerSecond(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, get_time=time.monotonic
    ) as bar:
        task = bar.add_task("tokenizing", total=num_rows)
        yield lambda rows: bar.advance(task, rows)


class ParallelTokenization:
    """Tokenizes datasets on all cores; equal to `text/sequential` sample by sample."""

    def __init__(
        self, config: ParallelTokenizationConfig, *, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._data = data

    def tokenize(self, datasets: Sequence[DatasetToTokenize]) -> Tokenized:
        """All samples of all datasets, in order. No row is read when the cache has the tokens."""
        if self._config.disable_cache:
            return self._in_memory(datasets)
        try:
            cache = TokenCache(self._config.cache_dir or default_cache_folder())
        except NoHomeError as error:
            return self._in_memory(datasets, (str(error),))
        if prints_date(self._tokenizer):
            cache.notes.append(
                "token cache: the chat template prints the date, so these tokens are for today's runs only."
            )
        today = date.today()
        key = cache_key(datasets, self._tokenizer, self._data, today)
        if not self._config.force_recache:
            found = cache.open(key)
            if found is not None:
                return replace(found, notes=(*found.notes, f"tokens read from the cache: {cache.folder / key.digest}"))
        problem = cache.write_problem(key, replace=self._config.force_recache)
        if problem is None:
            return self._fill(cache, key, datasets, today)
        return self._in_memory(datasets, (*cache.notes, problem))

    def _in_memory(self, datasets: Sequence[DatasetToTokenize], notes: Sequence[str] = ()) -> Tokenized:
        """Make the tokens and keep them for this run."""
        collector, more_notes = self._encode(datasets)
        return replace(collector.finish(), notes=(*notes, *more_notes))

    def _fill(self, cache: TokenCache, key: CacheKey, datasets: Sequence[DatasetToTokenize], today: date) -> Tokenized:
        """Make the tokens and keep them as an entry of the cache. today: what the key was made with."""
        with cache.writer(key, replace=self._config.force_recache) as writer:
            collector, notes = self._encode(datasets, writer, writer.folder)
            if cache_key(datasets, self._tokenizer, self._data, today).digest != key.digest:
                names = ", ".join(item.dataset.label for item in datasets)
                raise DataError(f"{names}: the data changed while it was being tokenized. Run the same command again.")
            made = writer.commit(collector.findings())
        return replace(made, notes=(*made.notes, *notes))

    def _encode(
        self, datasets: Sequence[DatasetToTokenize], sink: SampleSink | None = None, folder: Path | None = None
    ) -> tuple[SampleCollector, list[str]]:
        """Send the samples of all rows to the sink, memory if None. Returns the counts, and notes for the user.

        folder: where worker processes put their tokens; None is the folder for temporary files.
        """
        for dataset in datasets:
            check_rows(dataset.dataset)
        source = BlockSource(SliceTask(datasets, self._tokenizer, self._data), self._config, folder)
        collector = SampleCollector(datasets, sink)
        # Closed whatever happens here: an error must not leave worker processes behind.
        with show_progress(source.num_rows) as advance, closing(source.blocks(advance)) as blocks:
            for block in blocks:
                collector.add(block)
        return collector, source.notes


ROWS_PER_CHUNK = 256
"""Enough to keep the tokenizer's own threads busy, unless rows are short."""
MOST_ROWS_PER_CHUNK = 1024
TOKENS_PER_CHUNK = 1 << 16
"""Of short rows so many: the tokenizer's threads stand still for a moment after each chunk."""

Advance = Callable[[int], None]


class BlockSource:
    """Makes the blocks of all rows of a task. notes: lines for the user about how it went."""

    def __init__(self, task: SliceTask, config: ParallelTokenizationConfig, folder: Path | None = None) -> None:
        """folder: for the files of workers. Raises DataError for a dataset whose columns fit no format."""
        self._task, self._config, self._folder = task, config, folder
        self._encoder = BlockEncoder(task.datasets, task.tokenizer, task.data)
        self._encoder.check_formats()
        self._line = RowLine([len(source.dataset) for source in task.datasets])
        self._rows_per_chunk = ROWS_PER_CHUNK
        self.notes: list[str] = []

    @property
    def num_rows(self) -> int:
        """Rows of all datasets."""
        return len(self._line)

    def blocks(self, advance: Advance) -> Generator[SampleBlock, None, None]:
        """The blocks of all rows in order; close it when leaving early. advance: called with numbers of rows done."""
        if self._config.workers == 0:
            return self._here(self._chunks(range(self.num_rows)), advance)
        return self._measured(advance)

    def _measured(self, advance: Advance) -> Generator[SampleBlock, None, None]:
        """Encode the first rows here, with the clock running, and the rest where it will be done sooner."""
        chunks = self._chunks(range(self.num_rows))
        done = 0
        # The first chunk also compiles the template and starts threads; it says nothing about the others.
        for block in self._here(islice(chunks, 1), advance):
            done += block.num_rows
            yield block
        meter, unmeasured = CostMeter(), done
        for block in self._here(for_seconds(chunks, MEASURE_S), advance):
            done += block.num_rows
            yield block
        left, cost = self.num_rows - done, meter.cost(max(1, done - unmeasured))
        workers = self._workers(left, cost) if left else 0
        if workers:
            meanwhile = min(left - workers, rows_while_they_start(cost))
            try:
                with closing(self._in_workers(range(done, self.num_rows), workers, advance, meanwhile)) as blocks:
                    for block in blocks:
                        done += block.num_rows
                        yield block
            except UnsharableDataError as error:
                self._go_on_without(workers, error)
        yield from self._here(self._chunks(range(done, self.num_rows)), advance)

    def _workers(self, num_rows: int, cost: RowCost) -> int:
        if self._config.workers == "auto":
            return workers_worth_starting(num_rows, cost, min(idle_cores(), MAX_WORKERS), CLEARLY)
        # Whoever gives a number knows the machine, but may not know how little there is to do.
        return workers_worth_starting(
            num_rows, cost, min(self._config.workers, slices_worth_a_start(num_rows, cost)), 1.0
        )

    def _go_on_without(self, workers: int, error: UnsharableDataError) -> None:
        """Say that the data stays here. Raises DataError where the config asks for worker processes."""
        if self._config.workers != "auto":
            raise DataError(
                f"tokenization.workers: {self._config.workers}: the data cannot be given to worker processes "
                f"({error}). Define the dataset in a module that can be imported and let it be pickled, or set "
                "tokenization.workers: 0."
            ) from error
        self.notes.append(
            f"tokenized in one process instead of {workers}: the data cannot be given to another one ({error})."
        )

    def _chunks(self, rows: range) -> Iterator[Chunk]:
        return self._line.chunks(rows, lambda: self._rows_per_chunk)

    def _here(self, chunks: Iterator[Chunk], advance: Advance) -> Generator[SampleBlock, None, None]:
        for block in self._encoder.blocks(chunks):
            advance(block.num_rows)
            rows = TOKENS_PER_CHUNK * block.num_rows // max(1, len(block.tokens))
            self._rows_per_chunk = min(max(ROWS_PER_CHUNK, rows), max(ROWS_PER_CHUNK, MOST_ROWS_PER_CHUNK))
            yield block

    def _in_workers(
        self, rows: range, workers: int, advance: Advance, meanwhile: int
    ) -> Generator[SampleBlock, None, None]:
        """meanwhile: the first rows, which are encoded here while the workers start with the others."""
        here, there = rows[:meanwhile], rows[meanwhile:]
        timeout_s = self._config.stall_timeout_s
        with SliceWorkers(self._task, self._line, there, workers, timeout_s, advance, self._folder) as running:
            with closing(self._here(self._chunks(here), advance)) as blocks:
                yield from blocks
            yield from running.blocks()
