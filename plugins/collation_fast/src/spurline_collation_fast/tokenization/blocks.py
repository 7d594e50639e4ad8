"""Turn chunks of rows into blocks of samples, in this process or in a pool of processes.

Place on the way: chunks -> RowEncoder -> blocks. RowEncoder decides what a row becomes, as for `text/sequential`. Rows
do not travel to other processes: a pickled dataset says how to find them again, and a pickled tokenizer holds its own
JSON.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
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
from spurline_text.encoding import RowEncoder
from spurline_text.tokenization import block_of_outcomes

_STARTED = 2
"""Chunks that the tokenizer is given before the first of them is waited for."""
_WAITING = 2
"""Chunks that are handed out for each worker: one that it encodes, and one that it finds when it is done."""
_LOOK_S = 1.0
"""Seconds between two looks at whether all workers are alive."""
_STALL_TIMEOUT_S = 1800.0
"""Seconds that workers may take for the next chunk, which usually takes well under a second."""


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


class UnsharableDataError(Exception):
    """A dataset or tokenizer that another process cannot have. The text says why."""


@dataclass(frozen=True)
class TokenizationTask:
    """Datasets and how to encode them; the same for all workers."""

    datasets: Sequence[DatasetToTokenize]
    tokenizer: PreTrainedTokenizerBase
    data: DataConfig


class WorkerPool:
    """Processes that encode chunks, as a context manager: on leaving it none is alive.

    Entering it, or its first block, raises UnsharableDataError when a task cannot be given to other processes.
    """

    def __init__(self, task: TokenizationTask, num_workers: int) -> None:
        self._task, self._num_workers = task, num_workers
        # Process id -> worker. The dict is the executor's own, which it fills.
        self._processes: Any = {}

    def __enter__(self) -> WorkerPool:
        content = io.BytesIO()
        try:
            _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(self._task)
        except Exception as error:  # a foreign class may raise anything while it is taken apart
            raise UnsharableDataError(f"{type(error).__name__}: {error}") from error
        spawn = multiprocessing.get_context("spawn")
        initial = (content.getvalue(),)
        self._executor = ProcessPoolExecutor(self._num_workers, spawn, initializer=_begin, initargs=initial)
        self._processes = self._executor._processes
        return self

    def __exit__(self, *_: object) -> None:
        # Their results are no longer needed.
        for process in list(self._processes.values()):
            process.kill()
        # The executor's thread may be reading a block that a killed worker has sent half of. It sees the end of the
        # pipe, and `shutdown` returns, when nobody can write any more; this process holds a writing end for workers.
        executor: Any = self._executor
        executor._result_queue._writer.close()
        self._executor.shutdown(cancel_futures=True)

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the workers, once they are started."""
        return list(self._processes)

    def blocks(self, chunks: Iterable[Chunk]) -> Iterator[SampleBlock]:
        """Yield the block of each chunk, in order. Memory holds a few chunks of each worker.

        Raises what the first row in order that is an error would raise in this process, and RunFailedError for workers
        that die or stand still.
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
        # Any submit may start a process until there are enough: the executor starts none while a worker is idle.
        starts = len(self._processes) < self._num_workers
        with _without_main_module() if starts else nullcontext():
            return self._executor.submit(_encode, chunk)

    def _result(self, future: Future[SampleBlock]) -> SampleBlock:
        deadline = time.monotonic() + _STALL_TIMEOUT_S
        while not wait([future], timeout=_LOOK_S).done:
            # The executor does not see the end of a worker while it waits for the rest of a block from it.
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
    """Start processes that do not import the main module: a user's script would run once more there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_pickled_task = b""
_encoder: BlockEncoder | None = None


def _begin(pickled_task: bytes) -> None:
    """Prepare a worker: keep its task, use one thread, end with the parent."""
    global _pickled_task
    _pickled_task = pickled_task
    # Workers run in parallel instead of threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _encode(chunk: Chunk) -> SampleBlock:
    global _encoder
    if _encoder is None:
        try:
            task: TokenizationTask = pickle.loads(_pickled_task)  # noqa: S301 - made by the parent
        except Exception as error:  # noqa: BLE001 - a class that is not found here, or whatever it raises
            raise UnsharableDataError(f"{type(error).__name__}: {error}") from None
        _encoder = BlockEncoder(task.datasets, task.tokenizer, task.data, threads=False)
    return next(_encoder.blocks([chunk]))


class _Pickler(pickle.Pickler):
    """Knows the config classes that were put together for one run and exist in no module."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Section):
            return NotImplemented
        # The class as its author wrote it: the nearest base that its module has under its name.
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
