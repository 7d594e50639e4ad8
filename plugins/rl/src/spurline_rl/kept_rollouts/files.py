"""The folder of kept rollouts: one Parquet file per step, written beside its place and renamed.

A kill leaves a whole file or none. Files are forced to the disk before the checkpoint that covers them; a resume
removes those of later steps. No torch.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spurline.errors import RunDirectoryError
from spurline.files import regular_file, sync_file, write_failure

ROLLOUTS_FOLDER = "rollouts"
"""Name of the folder inside the run directory."""
_NAME = re.compile(r"step-(\d+)\.parquet")


def step_files(run_dir: Path) -> dict[int, Path]:
    """Return the file of each step, in order of steps. A run without the folder has none.

    Raises:
        RunDirectoryError: If the folder cannot be read.
    """
    folder = run_dir / ROLLOUTS_FOLDER
    try:
        named = [(_NAME.fullmatch(name), folder / name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunDirectoryError(f"{folder}: cannot be read: {error.strerror or error}.") from error
    return dict(sorted((int(name[1]), path) for name, path in named if name is not None))


def read_step(path: Path, columns: Sequence[str] | None = None) -> tuple[pa.Table, Mapping[bytes, bytes]] | None:
    """Return a step's table and the texts stored with it, or None if the file is gone.

    Raises:
        RunDirectoryError: If the file cannot be read or is damaged.
    """
    try:
        with open(path, "rb", opener=regular_file) as source, pq.ParquetFile(source) as file:
            return file.read(None if columns is None else list(columns)), file.metadata.metadata or {}
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RunDirectoryError(
            f"{path}: cannot be read: {why}. If it is damaged, remove it: the run goes on without."
        ) from error


def packed(tables: Iterable[pa.Table], schema: pa.Schema, texts: Mapping[str, str]) -> pa.Buffer:
    """Return the content of a Parquet file, with a row group for each table and the texts as metadata."""
    sink = pa.BufferOutputStream()
    # A low level is enough: most of a file is numbers that hardly get shorter.
    with pq.ParquetWriter(sink, schema, compression="zstd", compression_level=1) as writer:
        for table in tables:
            writer.write_table(table)
        writer.add_key_value_metadata(dict(texts))
    return sink.getvalue()


class RolloutFolder:
    """The folder while a run adds to it. If its files take more than `most_bytes`, the oldest ones are removed."""

    def __init__(self, run_dir: Path, most_bytes: int) -> None:
        self._run_dir, self._most_bytes = run_dir, most_bytes
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._unsynced: list[Path] = []
        self._sizes: dict[int, int] = {}

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
            if self._most_bytes:
                self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise write_failure(self._folder, error) from error

    def add(self, step: int, content: pa.Buffer) -> None:
        """Write the file of a step. From here on it survives the process.

        Raises:
            RunFailedError: If it cannot be written.
        """
        path = self._folder / f"step-{step:06d}.parquet"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                file.write(content)
            temporary.replace(path)
            self._unsynced.append(path)
            self._sizes[step] = content.size
            while sum(self._sizes.values()) > self._most_bytes and (old := min(self._sizes)) < step:
                (self._folder / f"step-{old:06d}.parquet").unlink(missing_ok=True)
                del self._sizes[old]
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_failure(path, error) from error

    def flush(self) -> None:
        """Force all files to the disk, so that they survive a power cut.

        Raises:
            RunFailedError: If that fails.
        """
        try:
            for path in self._unsynced:
                if path.exists():
                    sync_file(path)
            self._unsynced.clear()
            sync_file(self._folder)
        except OSError as error:
            raise write_failure(self._folder, error) from error
