"""Tokenization `parallel`: read tokens from the cache, or make them on all cores and cache them.

Data flow: datasets -> cache key -> a cache entry. If there is no entry: datasets -> blocks of samples ->
SampleCollector -> memory or a new entry. `text/sequential` encodes rows with the same RowEncoder.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import date
from typing import Literal

from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.data.token_store import SampleBlock, Tokenized
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.cache.folder import TokenCache
from spurline_collation_fast.cache.key import cache_key, prints_date
from spurline_collation_fast.configs import ParallelTokenizationConfig, default_cache_folder
from spurline_collation_fast.tokenization.blocks import (
    BlockEncoder,
    UnsharableDataError,
    WorkerPool,
    available_cores,
    chunks_of,
)
from spurline_text.tokenization import SampleCollector, SampleSink, check_rows

ROWS_PER_CHUNK = 256
"""Rows of a chunk, enough to keep the threads of the tokenizer busy unless the rows are short."""
MOST_ROWS_PER_CHUNK = 1024
TOKENS_PER_CHUNK = 1 << 16
"""If rows are short, chunks have about this many tokens. Small chunks are slow: the tokenizer pauses after each."""

ROWS_WORTH_WORKERS = 100_000
CORES_WORTH_WORKERS = 4
"""`workers: auto` starts workers if there are at least this many rows and cores. Starting workers takes 2 s. With fewer
rows or cores, the threads of the tokenizer are as fast."""
MAX_WORKERS = 64
"""More workers are not faster, since one process collects the blocks of all workers."""

Advance = Callable[[int], None]


@contextmanager
def show_progress(num_rows: int) -> Iterator[Advance]:
    """Show a progress bar, and yield a function that adds a number of finished rows. The bar disappears at the end."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"tokenizing {num_rows:,} rows", total=num_rows)
        yield lambda rows: bar.advance(task, rows)


class ParallelTokenization:
    """Tokenizes datasets on all cores. `text/sequential` makes exactly the same samples."""

    def __init__(
        self, config: ParallelTokenizationConfig, *, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config, self._tokenizer, self._data = config, tokenizer, data

    def tokenize(self, datasets: Sequence[DatasetToTokenize]) -> Tokenized:
        """Return all samples of all datasets, in order. If the cache has the tokens, this reads no rows."""
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
        # RuntimeError means that there is no home directory.
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
            writer.finish(collector.finish())
            made = cache.commit(writer.folder, key)
        return replace(made, notes=(*made.notes, *notes))

    def _in_memory(self, datasets: Sequence[DatasetToTokenize], notes: Sequence[str] = ()) -> Tokenized:
        collector, more_notes = self._encode(datasets)
        return replace(collector.finish(), notes=(*notes, *more_notes))

    def _encode(
        self, datasets: Sequence[DatasetToTokenize], sink: SampleSink | None = None
    ) -> tuple[SampleCollector, list[str]]:
        """Send the samples of all rows to `sink`, or keep them in memory if it is None. Also return notes for users."""
        for dataset in datasets:
            check_rows(dataset.dataset)
        encoder = BlockEncoder(datasets, self._tokenizer, self._data)
        encoder.check_formats()
        collector, notes = SampleCollector(datasets, sink), list[str]()
        sizes = [len(item.dataset) for item in datasets]
        # Close the generator at once after an error, so that no worker processes remain.
        made = _blocks(encoder, sizes, self._config.workers, notes)
        with show_progress(sum(sizes)) as advance, closing(made) as blocks:
            for block in blocks:
                advance(block.num_rows)
                collector.add(block)
        return collector, notes


def _blocks(
    encoder: BlockEncoder, sizes: Sequence[int], workers: int | Literal["auto"], notes: list[str]
) -> Generator[SampleBlock, None, None]:
    """Yield the blocks of all rows, in order. If the data cannot be sent to workers, add a line to `notes`."""
    done, rows_per_chunk = 0, ROWS_PER_CHUNK
    if num_workers := _num_workers(workers, sum(sizes)):
        try:
            with WorkerPool(encoder, num_workers) as pool:
                for block in pool.blocks(chunks_of(sizes, 0, lambda: ROWS_PER_CHUNK)):
                    done += block.num_rows
                    yield block
        except UnsharableDataError as error:
            notes.append(
                f"tokenized in one process instead of {num_workers}: the data cannot be sent to another process "
                f"({error}). Define the dataset in a module that can be imported, and make it picklable."
            )
    for block in encoder.blocks(chunks_of(sizes, done, lambda: rows_per_chunk)):  # noqa: B023 - reads the newest value
        fitting = TOKENS_PER_CHUNK * block.num_rows // max(1, len(block.tokens))
        rows_per_chunk = max(ROWS_PER_CHUNK, min(fitting, MOST_ROWS_PER_CHUNK))
        yield block


def _num_workers(workers: int | Literal["auto"], num_rows: int) -> int:
    if workers != "auto":
        return min(workers, num_rows)
    cores = available_cores()
    return min(cores, MAX_WORKERS) if cores >= CORES_WORTH_WORKERS and num_rows >= ROWS_WORTH_WORKERS else 0
