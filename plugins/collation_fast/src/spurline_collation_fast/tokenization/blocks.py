"""Who encodes which rows: this process, slice workers, or one after the other.

Place on the way: a SliceTask and the config -> blocks of samples in the order of the rows. The division changes the
time, never the blocks' samples.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from spurline.errors import DataError
from spurline_collation_fast.configs import ParallelTokenizationConfig
from spurline_collation_fast.tokenization.block_encoder import BlockEncoder
from spurline_collation_fast.tokenization.chunks import Chunk, RowLine, SampleBlock
from spurline_collation_fast.tokenization.slice_worker import SliceTask, UnsharableDataError
from spurline_collation_fast.tokenization.slice_workers import SliceWorkers
from spurline_collation_fast.tokenization.worker_choice import (
    MEASURE_S,
    CostMeter,
    available_cores,
    for_seconds,
    workers_worth_starting,
)

ROWS_PER_CHUNK = 256
"""Enough to keep the tokenizer's own threads busy."""

Advance = Callable[[int], None]


class BlockSource:
    """Makes the blocks of all rows of a task. notes: lines for the user about how it went."""

    def __init__(self, task: SliceTask, config: ParallelTokenizationConfig, folder: Path | None = None) -> None:
        """folder: for the files of workers. Raises DataError for a dataset whose columns fit no format."""
        self._task, self._config, self._folder = task, config, folder
        self._encoder = BlockEncoder(task.datasets, task.tokenizer, task.data)
        self._encoder.check_formats()
        self._line = RowLine([len(source.dataset) for source in task.datasets])
        self.notes: list[str] = []

    @property
    def num_rows(self) -> int:
        """Rows of all datasets."""
        return len(self._line)

    def blocks(self, advance: Advance) -> Generator[SampleBlock, None, None]:
        """The blocks of all rows in order; close it when leaving early. advance: called with numbers of rows done."""
        rows = range(self.num_rows)
        if self._config.workers == "auto":
            return self._soonest(advance)
        if self._config.workers == 0 or not rows:
            return self._here(self._line.chunks(rows, ROWS_PER_CHUNK), advance)
        return self._forced(rows, self._config.workers, advance)

    def _soonest(self, advance: Advance) -> Generator[SampleBlock, None, None]:
        """Encode the first rows here, with the clock running, and the rest where it will be done sooner."""
        chunks = self._line.chunks(range(self.num_rows), ROWS_PER_CHUNK)
        done = 0
        # The first chunk also compiles the template and starts threads; it says nothing about the others.
        for block in self._here(islice(chunks, 1), advance):
            done += block.num_rows
            yield block
        meter, unmeasured = CostMeter(), done
        for block in self._here(for_seconds(chunks, MEASURE_S), advance):
            done += block.num_rows
            yield block
        left = self.num_rows - done
        workers = workers_worth_starting(left, meter.cost(done - unmeasured), available_cores()) if left else 0
        if workers:
            try:
                with closing(self._in_workers(range(done, self.num_rows), workers, advance)) as blocks:
                    for block in blocks:
                        done += block.num_rows
                        yield block
            except UnsharableDataError as error:
                self.notes.append(
                    f"tokenized in one process instead of {workers}: the data cannot be given to another one ({error})."
                )
        yield from self._here(self._line.chunks(range(done, self.num_rows), ROWS_PER_CHUNK), advance)

    def _forced(self, rows: range, workers: int, advance: Advance) -> Generator[SampleBlock, None, None]:
        try:
            yield from self._in_workers(rows, workers, advance)
        except UnsharableDataError as error:
            raise DataError(
                f"tokenization.workers: {workers}: the data cannot be given to worker processes ({error}). Define the "
                "dataset in a module that can be imported and let it be pickled, or set tokenization.workers: 0."
            ) from error

    def _here(self, chunks: Iterator[Chunk], advance: Advance) -> Generator[SampleBlock, None, None]:
        for block in self._encoder.blocks(chunks):
            advance(block.num_rows)
            yield block

    def _in_workers(self, rows: range, workers: int, advance: Advance) -> Generator[SampleBlock, None, None]:
        timeout_s = self._config.stall_timeout_s
        with SliceWorkers(self._task, self._line, rows, workers, timeout_s, advance, self._folder) as running:
            yield from running.blocks()
