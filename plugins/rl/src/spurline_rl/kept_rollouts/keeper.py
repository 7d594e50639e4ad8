"""Write the rollouts of each step on a thread, while the model trains.

The file of a step is complete before the next file is begun, and before a checkpoint includes the step. If the run is
killed, no incomplete file is left. A resumed run removes the files of later steps.
"""

from __future__ import annotations

import errno
import sys
from concurrent.futures import Future
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from spurline.errors import RunFailedError
from spurline.files import write_bytes, write_failure
from spurline.threads import call_on_daemon
from spurline_rl.kept_rollouts.reader import ROLLOUTS_FOLDER, step_files
from spurline_rl.kept_rollouts.table import KeptStep, step_table
from spurline_text.token_pieces import TokenPieces

_LIMIT_S = 600.0
"""Time limit in seconds for writing one step. A working disk is much faster."""


class RolloutKeeper:
    """Writes the files of `RUN_DIR/rollouts`.

    If the files take more than `most_bytes`, the oldest files are removed. The newest file always stays. Nothing is
    written if `most_bytes` is 0.
    """

    def __init__(self, run_dir: Path, tokenizer: PreTrainedTokenizerBase, most_bytes: int) -> None:
        self._run_dir, self._most_bytes = run_dir, most_bytes
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._pieces = TokenPieces(tokenizer)
        self._writing: Future[None] | None = None
        self._sizes: dict[int, int] = {}

    @property
    def is_on(self) -> bool:
        return self._most_bytes > 0

    def start(self, last_step: int) -> None:
        """Remove the files of steps after `last_step`, and make the folder if rollouts are kept.

        Raises:
            RunFailedError: If the folder cannot be written.
        """
        try:
            if self._folder.is_symlink():
                raise OSError(errno.ELOOP, "it is a link, which is not followed; remove it")
            for step, path in step_files(self._run_dir).items():
                if step > last_step:
                    path.unlink()
                else:
                    self._sizes[step] = path.stat().st_size
            if self.is_on:
                self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise write_failure(self._folder, error) from error

    def keep(self, taken: KeptStep) -> None:
        """Begin to write a step. Raises RunFailedError if the previous step could not be written."""
        self.flush()
        self._writing = call_on_daemon("spurline-kept-rollouts", self._write, taken)

    def flush(self) -> None:
        """Wait until the last step is on the disk.

        Raises:
            RunFailedError: If the step cannot be written, or is not written within a time limit.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result(_LIMIT_S)
        except TimeoutError as error:
            raise RunFailedError(
                f"{self._folder}: writing the rollouts of a step takes more than {_LIMIT_S:g} s. Check the disk, or "
                "set source.keep_rollouts: 0 to go on without them."
            ) from error

    def close(self) -> None:
        """Call `flush`. If another error is already being raised, an error of `flush` is added to it as a note."""
        ended_by = sys.exception()
        try:
            self.flush()
        except Exception as failure:
            if ended_by is None:
                raise
            ended_by.add_note(f"Writing the rollouts failed too: {failure}")

    def _write(self, taken: KeptStep) -> None:
        self._sizes[taken.step] = write_step(self._folder, taken.step, step_table(taken, self._pieces))
        while sum(self._sizes.values()) > self._most_bytes and (oldest := min(self._sizes)) < taken.step:
            path = step_file(self._folder, oldest)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise write_failure(path, error) from error
            del self._sizes[oldest]


def write_step(folder: Path, step: int, table: pa.Table) -> int:
    """Write the file of a step, and return its size in bytes. Raises RunFailedError if it cannot be written."""
    sink = pa.BufferOutputStream()
    # A low compression level is enough, since most of a file is numbers that hardly compress. Without dictionaries
    # of values, tokens that a turn repeats from the turns before compress to almost nothing.
    pq.write_table(table, sink, compression="zstd", compression_level=1, use_dictionary=False)
    path, content = step_file(folder, step), sink.getvalue()
    try:
        write_bytes(path, content)
    except OSError as error:
        raise write_failure(path, error) from error
    return content.size


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"
