"""Tokenize on several processes: start slice workers, watch them, and read their blocks in the order of the rows.

Place on the way: datasets and a range of rows -> slice workers -> blocks. Samples come through files in a folder of
this run (inside the cache entry being written, if there is one), news through pipes; the blocks of a worker are read
one at a time, so memory stays flat. What a worker does is in `slice_worker`.
"""

from __future__ import annotations

import queue
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from spurline import errors
from spurline.child import ChildProcess
from spurline.data.token_store import SampleBlock
from spurline_collation_fast.tokenization.chunks import RowLine, even_slices, read_block
from spurline_collation_fast.tokenization.slice_worker import SliceTask, UnsharableDataError, slice_path
from spurline_text.own_folder import OwnFolder

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of a worker: the workers are what runs in parallel."""
_FOLDER_PREFIX = "spurline-tokenize-"


@dataclass
class _Worker:
    """One worker process. inbox: its messages that were not handled yet. stopped: we ended it."""

    number: int
    rows: range
    child: ChildProcess
    inbox: deque[dict[str, Any]] = field(default_factory=deque[dict[str, Any]])
    rows_done: int = 0
    has_ended: bool = False
    stopped: bool = False


class SliceWorkers:
    """Worker processes for a range of rows, as a context manager: on leaving it none is alive and no file is left.

    on_progress: called with a number of rows whenever some worker has encoded them. folder: where their files go, all
    tokens included; None is the folder for temporary files.
    """

    def __init__(
        self,
        task: SliceTask,
        line: RowLine,
        rows: range,
        num_workers: int,
        stall_timeout_s: float,
        on_progress: Callable[[int], None],
        folder: Path | None = None,
    ) -> None:
        self._task, self._line = task, line
        self._slices = even_slices(rows, min(num_workers, len(rows)))
        self._stall_timeout_s = stall_timeout_s
        self._on_progress = on_progress
        self._parent_folder = folder
        self._news: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def __enter__(self) -> SliceWorkers:
        """Start the workers. Raises UnsharableDataError when they cannot be given the data."""
        self._own_folder = OwnFolder(_FOLDER_PREFIX, self._parent_folder)
        self._folder = self._own_folder.path
        try:
            self._task.save(self._folder)
            for number, rows in enumerate(self._slices):
                self._workers.append(self._start(number, rows))
        except OSError as error:
            self._close()
            raise errors.RunFailedError(
                f"tokenization workers cannot be started: {error}. Their files go to {self._folder.parent}; set "
                "tokenization.cache_dir (without a cache TMPDIR) for another place, or tokenization.workers: 0."
            ) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    @property
    def process_ids(self) -> list[int]:
        """Of the workers, in the order of their slices."""
        return [worker.child.pid for worker in self._workers]

    def blocks(self) -> Iterator[SampleBlock]:
        """Blocks in the order of the rows, whoever is done first.

        Raises what the first row in order that is an error would raise in this process, RunFailedError for a worker
        that died or when none gets on, UnsharableDataError when a worker cannot load the task.
        """
        for worker in self._workers:
            path = slice_path(self._folder, worker.number)
            with path.open("rb") as file:
                while header := self._next_block(worker):
                    yield read_block(file, header)
            path.unlink()

    def _start(self, number: int, rows: range) -> _Worker:
        slice_path(self._folder, number).touch()

        def take(messages: list[dict[str, Any]]) -> None:
            for message in messages:
                self._news.put((number, message))

        child = ChildProcess(
            "spurline_collation_fast.tokenization.slice_worker",
            (self._folder, number, rows.start, rows.stop),
            take=take,
            on_end=lambda _: self._news.put((number, None)),
            log=self._folder / f"stderr-{number}",
            folder=self._folder,
            environment=_ONE_THREAD,
        )
        return _Worker(number, rows, child)

    def _next_block(self, worker: _Worker) -> dict[str, Any] | None:
        """Header of the worker's next block; None after the last."""
        while not worker.inbox:
            self._receive()
        message = worker.inbox.popleft()
        if "failed" in message:
            raise getattr(errors, message["failed"]["kind"])(message["failed"]["message"])
        return message.get("block")

    def _receive(self) -> None:
        """Take in one message of any worker."""
        try:
            number, message = self._news.get(timeout=self._stall_timeout_s)
        except queue.Empty:
            raise errors.RunFailedError(self._stalled()) from None
        worker = self._workers[number]
        if message is None:
            self._check_end(worker)
            return
        if "unsharable" in message:
            raise UnsharableDataError(message["unsharable"])
        if "block" in message:
            worker.rows_done += message["block"]["num_rows"]
            self._on_progress(message["block"]["num_rows"])
        else:
            worker.has_ended = True
        if "failed" in message:
            # An error of a lower row would be the one to report, one of a higher row would not.
            for other in self._workers[number + 1 :]:
                other.stopped = True
                other.child.kill()
        worker.inbox.append(message)

    def _check_end(self, worker: _Worker) -> None:
        """Raise RunFailedError when a worker has ended without saying how."""
        if worker.has_ended or worker.stopped:
            return
        how = f"ended with {worker.child.how_it_ended}."
        if (worker.child.exit_code or 0) < 0:
            why = ", which often means that memory ran out" if worker.child.exit_code == -signal.SIGKILL else ""
            fewer = "Use fewer workers (tokenization.workers; 0 uses none)."
            how = f"was {worker.child.how_it_ended}{why}. {fewer}"
        raise errors.RunFailedError(f"{self._name(worker)} {how}{self._said(worker)}")

    def _stalled(self) -> str:
        open_ones = [worker for worker in self._workers if not worker.has_ended and not worker.stopped]
        doing = "\n".join(f"  {self._name(worker)}: {worker.rows_done} rows done" for worker in open_ones)
        return (
            f"tokenization: no worker has encoded a row for {self._stall_timeout_s:g} s. Waiting for:\n{doing}\n"
            "Raise tokenization.stall_timeout_s if rows may take that long, or look at the storage that holds the data."
            + "".join(self._said(worker) for worker in open_ones)
        )

    def _name(self, worker: _Worker) -> str:
        (source, row), (last_source, last) = self._line.place(worker.rows.start), self._line.place(worker.rows[-1])
        labels = [item.dataset.label for item in self._task.datasets]
        end = f"row {last}" if last_source == source else f"row {last} of {labels[last_source]}"
        return (
            f"tokenization worker {worker.number + 1} of {len(self._workers)} (process {worker.child.pid}, "
            f"{labels[source]} row {row} to {end})"
        )

    def _said(self, worker: _Worker) -> str:
        """The end of the worker's standard error, when there is any."""
        text = worker.child.last_words()
        return f"\nIt said:\n{text}" if text else ""

    def _close(self) -> None:
        """End what still runs, wait for it, and remove the files."""
        for worker in self._workers:
            worker.child.kill()
        for worker in self._workers:
            worker.child.end()
        self._own_folder.remove()
