"""Tokenize on several processes: start slice workers, watch them, and read their blocks in the order of the rows.

Place on the way: datasets and a range of rows -> slice workers -> blocks. Samples come through files in a folder of
this run (inside the cache entry being written, if there is one), news through pipes; the blocks of a worker are read
one at a time, so memory stays flat. What a worker does is in `slice_worker`.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from spurline import errors
from spurline_collation_fast.tokenization.chunks import RowLine, SampleBlock, even_slices
from spurline_collation_fast.tokenization.slice_task import SliceTask, UnsharableDataError
from spurline_collation_fast.tokenization.slice_worker import slice_path, task_path

EXIT_TIMEOUT_S = 30.0
"""Seconds a worker may take to end after it was killed or has said that it is done."""

_STDERR_CHARACTERS = 3000


@dataclass
class _Worker:
    """One worker process. inbox: its messages that were not handled yet. stopped: we ended it."""

    number: int
    rows: range
    process: subprocess.Popen[bytes]
    reader: threading.Thread
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
        self._news: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def __enter__(self) -> SliceWorkers:
        """Start the workers. Raises UnsharableDataError when they cannot be given the data."""
        self._folder = Path(tempfile.mkdtemp(prefix="spurline-tokenize-", dir=self._parent_folder))
        try:
            self._task.save(task_path(self._folder))
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
        return [worker.process.pid for worker in self._workers]

    def blocks(self) -> Iterator[SampleBlock]:
        """Blocks in the order of the rows, whoever is done first.

        Raises what the first row in order that is an error would raise in this process, RunFailedError for a worker
        that died or when none gets on, UnsharableDataError when a worker cannot load the task.
        """
        for worker in self._workers:
            path = slice_path(self._folder, worker.number)
            with path.open("rb") as file:
                while header := self._next_block(worker):
                    yield SampleBlock.read(file, header)
            path.unlink()

    def _start(self, number: int, rows: range) -> _Worker:
        slice_path(self._folder, number).touch()
        arguments = [str(self._folder), *map(str, (number, rows.start, rows.stop))]
        with self._stderr_path(number).open("wb") as stderr:
            process = subprocess.Popen(
                # -P: a module in the working directory must not hide one of the same name elsewhere.
                [sys.executable, "-P", "-m", "spurline_collation_fast.tokenization.slice_worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_environment(),
                # Ctrl-C in a terminal is the parent's to handle.
                start_new_session=True,
            )
        reader = threading.Thread(target=self._read, args=(number, process), name=f"slice-{number}", daemon=True)
        reader.start()
        return _Worker(number, rows, process, reader)

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Queue a worker's lines as they come; an empty one says that there are no more."""
        assert process.stdout is not None
        for line in process.stdout:
            # What a killed worker did not finish saying says nothing.
            if line.endswith(b"\n"):
                self._news.put((number, line))
        self._news.put((number, b""))

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
            number, line = self._news.get(timeout=self._stall_timeout_s)
        except queue.Empty:
            raise errors.RunFailedError(self._stalled()) from None
        worker = self._workers[number]
        if not line:
            self._check_end(worker)
            return
        message = json.loads(line)
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
                other.process.kill()
        worker.inbox.append(message)

    def _check_end(self, worker: _Worker) -> None:
        """Raise RunFailedError when a worker has ended without saying how."""
        if worker.has_ended or worker.stopped:
            return
        code = worker.process.wait(EXIT_TIMEOUT_S)
        fewer = "Use fewer workers (tokenization.workers; 0 uses none)."
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += f", which often means that memory ran out. {fewer}" if -code == signal.SIGKILL else f". {fewer}"
        else:
            how = f"ended with exit code {code}."
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
            f"tokenization worker {worker.number + 1} of {len(self._workers)} (process {worker.process.pid}, "
            f"{labels[source]} row {row} to {end})"
        )

    def _said(self, worker: _Worker) -> str:
        """The end of the worker's standard error, when there is any."""
        text = self._stderr_path(worker.number).read_text(encoding="utf-8", errors="replace").strip()
        return f"\nIt said:\n{text[-_STDERR_CHARACTERS:]}" if text else ""

    def _stderr_path(self, number: int) -> Path:
        return self._folder / f"stderr-{number}"

    def _close(self) -> None:
        """End what still runs, wait for it, and remove the files."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait(EXIT_TIMEOUT_S)
            worker.reader.join(EXIT_TIMEOUT_S)
            for pipe in (worker.process.stdin, worker.process.stdout):
                assert pipe is not None
                pipe.close()
        shutil.rmtree(self._folder)


def _environment() -> dict[str, str]:
    """The parent's, with its module paths; one thread each, since the workers are what runs in parallel."""
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return {**os.environ, **one_thread, "PYTHONPATH": places}
