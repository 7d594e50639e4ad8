"""Write checkpoints on a thread of their own while training goes on: one at a time, complete or absent.

In: contents that were copied at a step. Out: a checkpoint, or the error that kept it from being one, which the loop's
thread takes between two steps. Whether a checkpoint is due, and what is in it, are the run's matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spurline.errors import CheckpointWriteError
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.checkpoints.resume import CheckpointContents

WAIT_LIMIT_S = 3600.0
"""How long the run stands still for a checkpoint that is being written."""
_ABANDON_LIMIT_S = 5.0
"""How long the end of a run waits for a checkpoint that is being renamed."""


class CheckpointWriter:
    """Belongs to the loop's thread, which starts each write and takes its end."""

    def __init__(self) -> None:
        self._writing: _Writing | None = None
        self._times: dict[str, float] = {}

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Measure the copy of what is to be written."""
        with self._measured("copy"):
            yield

    def start(self, contents: CheckpointContents, store: CheckpointStore, check_present: Callable[[], None]) -> None:
        """Begin to write. The checkpoint before has been taken.

        check_present: raises where the run directory is no longer the one that was opened.
        """
        assert self._writing is None, f"step {self._writing.step} is being written" if self._writing else ""
        self._writing = _Writing(contents, store, check_present)

    def taken(self, *, wait: bool) -> tuple[int, Path] | None:
        """(step, folder) of a checkpoint that has been written since the last call; None where none has.

        wait: for the one under way, at most `WAIT_LIMIT_S`. Raises what kept it from being written.
        """
        writing = self._writing
        if writing is None:
            return None
        if wait:
            with self._measured("wait"):
                writing.done.wait(WAIT_LIMIT_S)
            if not writing.done.is_set():
                self.abandon()
                raise CheckpointWriteError(
                    f"The checkpoint of step {writing.step} is still being written to {writing.store.root} after "
                    f"{WAIT_LIMIT_S / 60:.0f} minutes of waiting, and has been given up. Does the storage hang? "
                    "Earlier checkpoints are intact: run again to resume."
                )
        elif not writing.done.is_set():
            return None
        self._writing = None
        return writing.result()

    def abandon(self) -> tuple[int, Path] | None:
        """Let nothing of a write under way become a checkpoint after this; returns what has become one before."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        writing.abandon()
        return (writing.step, writing.path) if writing.path is not None else None

    def metrics(self) -> dict[str, float]:
        """`time/checkpoint_copy` and `time/checkpoint_wait` since the last call: seconds in which the run stood still
        for the copy of a checkpoint, and for the write of the one before."""
        times, self._times = self._times, {}
        return times

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        begin, name = time.perf_counter(), f"time/checkpoint_{what}"
        try:
            yield
        finally:
            self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - begin


class _Writing:
    """One checkpoint on its way. path: its folder once it is one."""

    def __init__(self, contents: CheckpointContents, store: CheckpointStore, check_present: Callable[[], None]) -> None:
        self.step, self.store = contents.step, store
        self.path: Path | None = None
        self.done = threading.Event()
        self._contents = contents
        self._check_present = check_present
        self._error: BaseException | None = None
        self._publishing = threading.Lock()
        self._is_abandoned = False
        # The end of the process does not wait for a disk that hangs: what is half written is removed at the next start.
        threading.Thread(target=self._run, name="spurline-checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            self._check_present()
            prepared = self.store.prepare(self.step, self._contents.write, self._contents.facts)
            with self._publishing:
                if self._is_abandoned:
                    prepared.discard()
                    return
                self._check_present()
                self.path = self._contents.publish(self.store, prepared)
        except BaseException as error:  # noqa: BLE001 - raised where the end of the write is taken
            self._error = error
        finally:
            self.done.set()

    def result(self) -> tuple[int, Path]:
        """Return step and path of a write that is done, or raise its error."""
        if self._error is not None:
            raise self._error
        assert self.path is not None, f"step {self.step} was abandoned"
        return self.step, self.path

    def abandon(self) -> None:
        # One that is being renamed becomes a checkpoint, which it is but for its name.
        held = self._publishing.acquire(timeout=_ABANDON_LIMIT_S)
        self._is_abandoned = True
        if held:
            self._publishing.release()
