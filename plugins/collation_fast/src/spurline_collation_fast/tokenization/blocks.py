"""Turn chunks of rows into blocks of samples, in this process or in a pool of processes.

Data flow: chunks -> RowEncoder -> blocks. `text/sequential` encodes rows with the same RowEncoder. Rows are
not sent to other processes. Each worker gets a pickled dataset and a pickled tokenizer, and reads the rows itself.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.config.section import Section
from spurline.data.token_store import SampleBlock
from spurline.errors import RunFailedError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_concurrency.child import end_with
from spurline_text.encoding import RowEncoder
from spurline_text.tokenization import block_of_outcomes

_STARTED = 2
"""Number of later chunks that are already started while the caller waits for the block of a chunk."""
_WAITING = 2
"""Number of submitted chunks for each worker: one that it encodes, and one that waits in the queue."""
_LOOK_S = 1.0
"""Seconds between two checks that all workers are alive."""
_STALL_TIMEOUT_S = 1800.0
"""Seconds that workers may take for one chunk. Usually a chunk takes well under a second."""


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
        first: The row to begin with, counted from 0 over all datasets.
        rows_at_most: Returns the maximum number of rows of the next chunk.
    """
    for source, size in enumerate(sizes):
        start = min(first, size)
        first -= start
        while start < size:
            stop = min(start + rows_at_most(), size)
            yield Chunk(source, start, stop)
            start = stop


class BlockEncoder:
    """Encodes chunks of the rows of several datasets.

    With `threads`, a second thread encodes while the calling thread reads rows. A pickled copy uses no second thread.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetToTokenize],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        threads: bool = True,
    ) -> None:
        self._datasets, self._tokenizer, self._data = datasets, tokenizer, data
        # On one core, threads would only take turns.
        self._uses_thread = threads and available_cores() > 1
        self._encoders: dict[int, RowEncoder] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(BlockEncoder, threads=False), (self._datasets, self._tokenizer, self._data)

    def check_formats(self) -> None:
        """Raise DataError for the first dataset whose columns fit no format."""
        for source in range(len(self._datasets)):
            self._encoder(source)

    def blocks(self, chunks: Iterable[Chunk]) -> Iterator[SampleBlock]:
        """Yield the block of each chunk, in order. Only the calling thread reads datasets.

        While the tokenizer encodes one chunk on its own threads, the calling thread renders the rows of later chunks
        and makes the masks of the previous chunk. So the tokenizer's threads never wait for a chunk. Raises the error
        of the first bad row, in the order of the rows.
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
        """Start encoding a chunk. Return a function that waits for the block, and returns it or raises an error."""
        encoder = self._encoder(chunk.source)
        prepared = encoder.prepare(range(chunk.start, chunk.stop))
        if executor is None:
            return lambda: block_of_outcomes(chunk.source, encoder.finish(prepared, encoder.encode_texts(prepared)))
        encoded = executor.submit(encoder.encode_texts, prepared)
        # The result needs no time limit: this process computes it, so it cannot get lost.
        return lambda: block_of_outcomes(chunk.source, encoder.finish(prepared, encoded.result()))

    def _encoder(self, source: int) -> RowEncoder:
        if source not in self._encoders:
            self._encoders[source] = RowEncoder(self._datasets[source], self._tokenizer, self._data)
        return self._encoders[source]


class UnsharableDataError(Exception):
    """Raised if a dataset or tokenizer cannot be sent to another process. The message gives the reason."""


class WorkerPool:
    """A context manager that starts worker processes, which encode chunks. Leaving the context ends all workers.

    Entering the context, or asking for the first block, raises UnsharableDataError if the encoder cannot be sent to
    other processes.
    """

    def __init__(self, encoder: BlockEncoder, num_workers: int) -> None:
        self._encoder, self._num_workers = encoder, num_workers
        # Workers by process id. Entering the context replaces this dict by the executor's own dict.
        self._processes: Any = {}

    def __enter__(self) -> WorkerPool:
        content = io.BytesIO()
        try:
            _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(self._encoder)
        except Exception as error:  # a foreign class may raise anything while it is pickled
            raise UnsharableDataError(f"{type(error).__name__}: {error}") from error
        spawn = multiprocessing.get_context("spawn")
        initial = (content.getvalue(),)
        self._executor = ProcessPoolExecutor(self._num_workers, spawn, initializer=_begin, initargs=initial)
        self._processes = self._executor._processes
        return self

    def __exit__(self, *_: object) -> None:
        # The results of the workers are no longer needed.
        for process in list(self._processes.values()):
            process.kill()
        # The executor's thread may wait for the second half of a block from a killed worker, and `shutdown` waits for
        # the thread. The thread sees the end of the pipe when all write ends are closed. One is in this process.
        executor: Any = self._executor
        executor._result_queue._writer.close()
        self._executor.shutdown(cancel_futures=True)

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the workers that have been started."""
        return list(self._processes)

    def blocks(self, chunks: Iterable[Chunk]) -> Iterator[SampleBlock]:
        """Yield the block of each chunk, in order. Only a few chunks per worker are in memory at a time.

        Raises the error of the first bad row in the order of the rows, and RunFailedError if a worker dies or hangs.
        """
        rest = iter(chunks)
        waiting: deque[Future[SampleBlock]] = deque()
        try:
            waiting.extend(self._submit(chunk) for chunk in islice(rest, self._num_workers * _WAITING))
            while waiting:
                yield self._result(waiting.popleft())
                waiting.extend(self._submit(chunk) for chunk in islice(rest, 1))
        except BrokenProcessPool as error:
            raise RunFailedError(
                "tokenization: a worker process died, which often means that memory ran out. Use fewer workers "
                "(tokenization.workers; 0 uses none)."
            ) from error

    def _submit(self, chunk: Chunk) -> Future[SampleBlock]:
        # The executor starts a process only if no worker is idle. Until all workers run, each submit may start another.
        starts = len(self._processes) < self._num_workers
        with _without_main_module() if starts else nullcontext():
            return self._executor.submit(_encode, chunk)

    def _result(self, future: Future[SampleBlock]) -> SampleBlock:
        deadline = time.monotonic() + _STALL_TIMEOUT_S
        while not wait([future], timeout=_LOOK_S).done:
            # While the executor waits for the rest of a block, it does not notice that the worker has ended.
            if connection.wait([process.sentinel for process in list(self._processes.values())], timeout=0):
                raise BrokenProcessPool("a worker ended")
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"tokenization: no worker has finished the next rows within {_STALL_TIMEOUT_S:g} s. Look at the "
                    "storage that holds the data, or set tokenization.workers: 0."
                )
        return future.result()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep new processes from importing the main module. Otherwise each of them would run the user's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_pickled_encoder = b""
_encoder: BlockEncoder | None = None


def _begin(pickled_encoder: bytes) -> None:
    """Prepare a worker: keep the pickled encoder, use one thread, and end with the parent."""
    global _pickled_encoder
    _pickled_encoder = pickled_encoder
    # The workers run in parallel, so each needs only one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The parent handles Ctrl-C and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()
    end_with(parent.pid)


def _encode(chunk: Chunk) -> SampleBlock:
    global _encoder
    if _encoder is None:
        try:
            _encoder = pickle.loads(_pickled_encoder)  # noqa: S301 - made by the parent
        except Exception as error:  # noqa: BLE001 - a foreign class may raise anything
            raise UnsharableDataError(f"{type(error).__name__}: {error}") from None
        assert _encoder is not None
    return next(_encoder.blocks([chunk]))


class _Pickler(pickle.Pickler):
    """A pickler for configs whose classes were created for one run, and cannot be imported from a module."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Section):
            return NotImplemented
        # Pickle the nearest base class that can be imported. This is the class in the source code.
        written = next(
            base
            for base in type(value).__mro__
            if getattr(sys.modules.get(base.__module__), base.__qualname__, None) is base
        )
        return _restore, (written, value.__getstate__())


def _restore(kind: type[Section], state: dict[Any, Any]) -> Section:
    section = kind.__new__(kind)
    section.__setstate__(state)
    return section
