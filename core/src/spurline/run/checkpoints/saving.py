"""Save the checkpoints of a run, either during the step or beside training, and report each.

In: a step and the state of the run. Out: a checkpoint in the run directory, which is reported to `RunState` and the
hooks. The run decides which steps have one; `checkpoint_writer` is the thread that writes beside training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from spurline.config.loading import LoadedConfig
from spurline.errors import RunDirectoryLostError
from spurline.run.build import Components
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.checkpoints.checkpoint_writer import CheckpointWriter
from spurline.run.checkpoints.resume import CheckpointContents, Course, save_state
from spurline.run.directory import RunDirectory
from spurline.run.state import RunState


class Saving:
    """Belongs to the loop's thread.

    state: of the run; its checkpoint and saved_step are set here. course: how the run has gone by now, which takes the
    metrics of a step whose evaluation and metrics line are still to come.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        directory: RunDirectory,
        components: Components,
        state: RunState,
        course: Callable[[Mapping[str, float] | None], Course],
    ) -> None:
        self.has_saved = False
        """True if a checkpoint of this process is complete."""
        self._loaded = loaded
        self._directory = directory
        self._components = components
        self._state = state
        self._course = course
        self._writer = CheckpointWriter()
        self._saved_at = time.monotonic()

    def is_time(self) -> bool:
        """Return whether `checkpoint.every_minutes` have gone by since the last one."""
        minutes = self._loaded.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def save(self, step: int, pending: Mapping[str, float] | None = None, *, beside: bool = False) -> None:
        """pending: metrics of this step, when its evaluation and metrics line are still to come. beside: copy what is
        to be saved, and let it be written while training goes on."""
        self._directory.check_present()
        self.take_written(wait=True)
        for tracker in self._components.trackers.values():
            tracker.flush()
        self._components.data.source.flush()
        course = self._course(pending)
        if beside:
            with self._writer.copying():
                contents = CheckpointContents.of(step, self._components, self._loaded, course, copied=True)
            store = CheckpointStore(self._directory.checkpoints)
            self._writer.start(contents, store, self._directory.check_present)
        else:
            self._saved(step, save_state(step, self._components, self._loaded, self._directory, course))
        self._saved_at = time.monotonic()

    def save_before(self, error: Exception, step: int, pending: Mapping[str, float]) -> None:
        """Save a step whose evaluation has failed; the error, which goes on, says what came of it."""
        try:
            self.save(step, pending)
        except Exception as failure:  # noqa: BLE001 - it must not hide the evaluation's own error
            error.add_note(f"The step before it could not be saved either: {failure}")
        else:
            error.add_note(f"Step {step} itself was trained and saved; the same command evaluates again and goes on.")

    def take_written(self, *, wait: bool) -> None:
        """Take note of the checkpoint that was written beside training, if there is one. Raises what became of it."""
        written = self._writer.taken(wait=wait)
        if written is not None:
            self._saved(*written)

    def settle(self, error: BaseException) -> None:
        """See what becomes of a checkpoint that is being written when the run fails: it stands, and so it is said."""
        if isinstance(error, (KeyboardInterrupt, RunDirectoryLostError)):
            written = self.abandon()
            if written is not None:
                self._state.saved_step, self._state.checkpoint = written
            return
        try:
            self.take_written(wait=True)
        except Exception as failure:  # noqa: BLE001 - it must not hide the error that ended the run
            # It may be whole: a hook that was told of it fails here as well.
            error.add_note(f"Ending the checkpoint under way failed too: {failure}")

    def abandon(self) -> tuple[int, Path] | None:
        """Let nothing that is being written become a checkpoint after this; returns what has become one before."""
        return self._writer.abandon()

    def metrics(self) -> dict[str, float]:
        """Seconds that checkpoints beside training have taken from it since the last call."""
        return self._writer.metrics()

    def _saved(self, step: int, path: Path) -> None:
        self._state.checkpoint, self._state.saved_step, self.has_saved = path, step, True
        self._loaded.host.hooks.on_checkpoint_saved(step=step, path=path)
