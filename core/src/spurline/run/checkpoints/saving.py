"""Save the checkpoints of a run, either within a step or on another thread while training goes on.

`RunState` and the hooks learn of each complete checkpoint. The module `session` decides when to save.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

from spurline.config.loading import LoadedConfig
from spurline.digests import FileDigest
from spurline.errors import CheckpointWriteError, RunDirectoryLostError
from spurline.plugins.run_view import RunState
from spurline.protocols.backend import TakesSnapshots
from spurline.run.build import Components
from spurline.run.checkpoints.checkpoint import BACKEND, CheckpointStore, Write, Written
from spurline.run.checkpoints.resume import stateful_components
from spurline.run.checkpoints.state_files import copied_state, write_state
from spurline.run.directory import RunDirectory
from spurline.run.evaluations.evaluation import fingerprints
from spurline.threads import call_on_daemon

WAIT_LIMIT_S = 3600.0
"""Longest time that a run waits for a checkpoint that is being written."""
_ABANDON_LIMIT_S = 5.0
"""Longest time that a run waits at its end for a checkpoint that is being renamed."""


class Writing:
    """A checkpoint that is written at once, or on another thread while training goes on.

    Args:
        store: The checkpoints of the run.
        step: The last step trained before the checkpoint.
        fill: Function that writes the files into the checkpoint's folder.
        facts: Entries of the checkpoint's manifest.
        keep_last: Number of newest checkpoints that are kept. The checkpoint of the best evaluation is kept too.
    """

    def __init__(
        self, store: CheckpointStore, step: int, fill: Write, facts: Mapping[str, Any], keep_last: int
    ) -> None:
        self.step = step
        self._store, self._fill, self._facts, self._keep_last = store, fill, facts, keep_last
        self._path: Path | None = None
        self._done: futures.Future[None] | None = None
        self._publishing = threading.Lock()
        self._is_abandoned = False

    @classmethod
    def of(
        cls,
        store: CheckpointStore,
        step: int,
        components: Components,
        loaded: LoadedConfig,
        course: Mapping[str, Any],
        *,
        copied: bool,
    ) -> Self:
        """Return the checkpoint of a step. `course` has facts about the run so far, for the manifest.

        If `copied`, all state is copied now, so that another thread can write it while training goes on. Otherwise
        state is read while it is written.
        """
        save, states = components.backend.save, _states(components, loaded)
        if copied:
            # The config's checks have refused backends that cannot take snapshots.
            assert isinstance(components.backend, TakesSnapshots), type(components.backend)
            save = components.backend.snapshot()
            states = [(name, copied_state(state), owner) for name, state, owner in states]
        verifies = loaded.config.backend.facts.verifies_files

        def fill(folder: Path) -> Written:
            (folder / BACKEND).mkdir()
            own = {f"{BACKEND}/{name}": digest for name, digest in save(folder / BACKEND).items()}
            others: dict[str, FileDigest] = {}
            for name, state, owner in states:
                path = folder / name
                written = write_state(path, state, owner)
                others |= {str(path.parent.relative_to(folder) / file): digest for file, digest in written.items()}
            return Written(own | others, own.keys() if verifies else ())

        facts = {"config": loaded.resolved(), "versions": loaded.host.versions(), **course}
        facts["held_out"] = fingerprints(components.data.evaluations)
        return cls(store, step, fill, facts, loaded.config.checkpoint.keep_last)

    def write(self) -> None:
        """Write the checkpoint, make it the latest, and delete older ones that need not be kept."""
        prepared = self._store.prepare(self.step, self._fill, self._facts)
        best = self._facts["best"]["step"] if self._facts.get("best") else None
        with self._publishing:
            if self._is_abandoned:
                shutil.rmtree(prepared, ignore_errors=True)
                return
            self._path = self._store.publish(self.step, prepared, best)
            self._store.prune(self._keep_last, best)

    def write_beside(self) -> Self:
        """Begin `write` on another thread, and return this object."""
        # If the disk hangs, a daemon thread does not keep the process alive. The next start removes unfinished files.
        self._done = call_on_daemon("spurline-checkpoint", self.write)
        return self

    def is_done(self, wait_s: float = 0.0) -> bool:
        """Wait up to `wait_s` seconds for the other thread to end, and return whether it has ended."""
        assert self._done is not None, "not written on another thread"
        return bool(futures.wait([self._done], wait_s).done)

    def result(self) -> Path:
        """Return the folder of the finished checkpoint, or raise the error that ended the other thread."""
        if self._done is not None:
            self._done.result()
        assert self._path is not None, f"step {self.step} was abandoned"
        return self._path

    def abandon(self) -> Path | None:
        """Prevent the checkpoint from being published. Returns its folder if it was published already."""
        # If the complete checkpoint is being renamed, wait until the rename is done.
        held = self._publishing.acquire(timeout=_ABANDON_LIMIT_S)
        self._is_abandoned = True
        if held:
            self._publishing.release()
        return self._path


def _states(components: Components, loaded: LoadedConfig) -> Iterable[tuple[str, Mapping[str, object], str | None]]:
    """Yield (path in a checkpoint, state, name for messages) of components and hooks, reading one state at a time."""
    for name, component in stateful_components(components, loaded):
        yield f"components/{name}", component.state_dict(), None
    yield from components.hook_states.states()


class Saving:
    """Saves checkpoints, and records them in `state`. Its methods are called on the loop's thread only.

    `course` returns facts about the run so far, for the manifest. Its argument is the metrics of the last step if that
    step has not been evaluated yet, else None.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: RunDirectory,
        components: Components,
        state: RunState,
        course: Callable[[Mapping[str, float] | None], Mapping[str, Any]],
    ) -> None:
        self.has_saved = False
        """True if this process has saved a complete checkpoint."""
        self._loaded, self._directory = loaded, directory
        self._store = CheckpointStore(directory.checkpoints)
        self._components = components
        self._state = state
        self._course = course
        self._writing: Writing | None = None
        self._times: dict[str, float] = {}
        self._saved_at = time.monotonic()

    def is_time(self) -> bool:
        """Return whether `checkpoint.every_minutes` have passed since the last checkpoint."""
        minutes = self._loaded.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def save(self, step: int, pending: Mapping[str, float] | None = None, *, beside: bool = False) -> None:
        """Save a checkpoint.

        Args:
            step: The step that has just been trained.
            pending: The metrics of the step if it has not been evaluated and recorded yet, else None.
            beside: Whether to copy the state now, and write the copy on another thread while training goes on.
        """
        self.take_written(wait=True)
        self._directory.check_present()
        for tracker in self._components.trackers.values():
            tracker.flush()
        self._components.data.source.flush()
        course = self._course(pending)
        with self._measured("copy") if beside else nullcontext():
            writing = Writing.of(self._store, step, self._components, self._loaded, course, copied=beside)
        if beside:
            self._writing = writing.write_beside()
        else:
            writing.write()
            self._saved(step, writing.result())
        self._saved_at = time.monotonic()

    def save_before(self, error: Exception, step: int, pending: Mapping[str, float]) -> None:
        """Save a step whose evaluation failed with `error`. A note on the error says whether the step was saved."""
        try:
            self.save(step, pending)
        except Exception as failure:  # noqa: BLE001 - the evaluation's own error must be raised
            error.add_note(f"Step {step} could not be saved either: {failure}")
        else:
            error.add_note(f"Step {step} was trained and saved. Run the same command to evaluate it again and go on.")

    def take_written(self, *, wait: bool) -> None:
        """If another thread has written a checkpoint, report it. If the writing failed, raise the thread's error."""
        writing = self._writing
        if writing is None:
            return
        if wait:
            with self._measured("wait"):
                writing.is_done(WAIT_LIMIT_S)
        elif not writing.is_done():
            return
        if not writing.is_done():
            self.abandon()
            raise CheckpointWriteError(
                f"The checkpoint of step {writing.step} is still being written to {self._store.root} after "
                f"{WAIT_LIMIT_S / 60:.0f} minutes of waiting, and has been given up. Does the storage hang? "
                "Earlier checkpoints are intact: run again to resume."
            )
        self._writing = None
        self._saved(writing.step, writing.result())

    def settle(self, error: BaseException) -> None:
        """After the run has failed with `error`, wait until the checkpoint that is being written is complete.

        After a second signal, or if the run directory is lost, abandon the checkpoint instead.
        """
        if isinstance(error, (KeyboardInterrupt, RunDirectoryLostError)):
            self.abandon()
            return
        try:
            self.take_written(wait=True)
        except Exception as failure:  # noqa: BLE001 - the error that ended the run must be raised
            error.add_note(f"Writing the last checkpoint failed too: {failure}")

    def abandon(self) -> None:
        """Prevent any checkpoint that is being written from being published."""
        writing, self._writing = self._writing, None
        path = None if writing is None else writing.abandon()
        if writing is not None and path is not None:
            self._state.saved_step, self._state.checkpoint = writing.step, path

    def metrics(self) -> dict[str, float]:
        """Return the seconds that training has waited for asynchronous checkpoints since the last call.

        `time/checkpoint_copy` is the time to copy the state, `time/checkpoint_wait` the wait for an earlier checkpoint.
        """
        times, self._times = self._times, {}
        return times

    def _saved(self, step: int, path: Path) -> None:
        self._state.checkpoint, self._state.saved_step, self.has_saved = path, step, True
        self._loaded.host.hooks.on_checkpoint_saved(step=step, path=path)

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        begin, name = time.perf_counter(), f"time/checkpoint_{what}"
        try:
            yield
        finally:
            self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - begin
