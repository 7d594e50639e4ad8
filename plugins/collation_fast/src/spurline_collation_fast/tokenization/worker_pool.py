"""Encode chunks of rows in a pool of processes, and take their blocks in order.

Rows do not travel: a dataset says with its pickled form how to find them again, and a tokenizer with its own JSON. They
are pickled into a file without a name, which workers find among the open files of this process: it goes with it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.config.section import Section
from spurline.data.token_store import SampleBlock
from spurline.errors import RunFailedError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.tokenization.block_encoder import BlockEncoder
from spurline_collation_fast.tokenization.chunks import Chunk

_WAITING = 2
"""Chunks that are handed out for each worker: one that it encodes, and one that it finds when it is done."""
_LOOK_S = 1.0
"""Seconds between two looks at whether all workers are alive."""


class UnsharableDataError(Exception):
    """A dataset or tokenizer that another process cannot have. The text says why."""


@dataclass(frozen=True)
class TokenizationTask:
    """Datasets and how to encode them; the same for all workers."""

    datasets: Sequence[DatasetToTokenize]
    tokenizer: PreTrainedTokenizerBase
    data: DataConfig

    def save(self, file: IO[bytes]) -> None:
        """Write the task. Raises UnsharableDataError when something in it cannot be pickled."""
        try:
            _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(self)
            file.flush()
        except OSError:
            raise
        except Exception as error:  # a foreign class may raise anything while it is taken apart
            raise UnsharableDataError(f"{type(error).__name__}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> TokenizationTask:
        """Raises UnsharableDataError when a class in it is not found by its module and name, say in `__main__`."""
        with path.open("rb") as file:
            try:
                task = pickle.load(file)  # noqa: S301 - the parent's own open file
            except Exception as error:  # noqa: BLE001 - a class that is not found, or whatever it raises
                raise UnsharableDataError(f"{type(error).__name__}: {error}") from None
        assert isinstance(task, cls), type(task)
        return task


class WorkerPool:
    """Processes that encode chunks, as a context manager: on leaving it none is alive.

    Raises UnsharableDataError when a task cannot be given to other processes.
    """

    def __init__(self, task: TokenizationTask, num_workers: int, stall_timeout_s: float) -> None:
        self._num_workers, self._stall_timeout_s = num_workers, stall_timeout_s
        self._task = task
        # Process id -> worker. The executor's own, which it fills.
        self._processes: Any = {}

    def __enter__(self) -> WorkerPool:
        self._file = tempfile.TemporaryFile()
        path = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        try:
            self._task.save(self._file)
        except BaseException:
            self._file.close()
            raise
        spawn = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(self._num_workers, spawn, initializer=_begin, initargs=(path,))
        self._processes = self._executor._processes
        return self

    def __exit__(self, *_: object) -> None:
        # Whatever they are doing is not needed any more.
        for process in list(self._processes.values()):
            process.kill()
        # The executor's thread may be reading a block that a killed worker has sent half of. It sees the end of the
        # pipe, and `shutdown` returns, when nobody can write any more; this process holds a writing end for workers.
        executor: Any = self._executor
        executor._result_queue._writer.close()
        self._executor.shutdown(cancel_futures=True)
        self._file.close()

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the workers, once they are started."""
        return list(self._processes)

    def blocks(self, chunks: Iterable[Chunk]) -> Iterator[SampleBlock]:
        """Yield the block of each chunk, in order. Memory holds a few chunks of each worker.

        Raises what the first row in order that is an error would raise in this process, RunFailedError for a worker
        that died and for a chunk that takes longer than the time limit.
        """
        rest = iter(chunks)
        waiting: deque[Future[SampleBlock]] = deque()
        try:
            waiting.extend(self._submit(chunk) for chunk in islice(rest, self._num_workers * _WAITING))
            while waiting:
                yield self._result(waiting.popleft())
                waiting.extend(self._submit(chunk) for chunk in islice(rest, 1))
        except TimeoutError:
            raise RunFailedError(
                f"tokenization: no worker has finished the next rows within {self._stall_timeout_s:g} s. Raise "
                "tokenization.stall_timeout_s if rows may take that long, or look at the storage that holds the data."
            ) from None
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
        """Wait for a block. Raises what `blocks` makes of it: TimeoutError, BrokenProcessPool."""
        deadline = time.monotonic() + self._stall_timeout_s
        while not wait([future], timeout=min(_LOOK_S, self._stall_timeout_s)).done:
            # The executor does not see the end of a worker while it waits for the rest of a block from it.
            if connection.wait([process.sentinel for process in list(self._processes.values())], timeout=0):
                raise BrokenProcessPool("a worker ended")
            if time.monotonic() > deadline:
                raise TimeoutError
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


_task: Path | None = None
_encoder: BlockEncoder | None = None


def _begin(task: Path) -> None:
    """Prepare a worker: keep the place of the task, use one thread, end with the parent."""
    global _task
    _task = task
    # The workers are what runs in parallel.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A key that ends the run goes to the parent, which ends its workers.
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
        assert _task is not None, "a worker begins with _begin"
        task = TokenizationTask.load(_task)
        _encoder = BlockEncoder(task.datasets, task.tokenizer, task.data, threads=False)
    return next(_encoder.blocks([chunk]))


class _Pickler(pickle.Pickler):
    """Knows the config classes that were put together for one run and exist in no module."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Section):
            return _restore, (_written_class(type(value)), value.__getstate__())
        return NotImplemented


def _written_class(kind: type[Section]) -> type[Section]:
    """Return the class as its author wrote it: the nearest base that its module has under its name."""
    for base in kind.__mro__:
        if getattr(sys.modules.get(base.__module__), base.__qualname__, None) is base:
            return base
    raise AssertionError(f"Section itself is in its module, but is no base of {kind}")


def _restore(kind: type[Section], state: dict[Any, Any]) -> Section:
    section = kind.__new__(kind)
    section.__setstate__(state)
    return section
