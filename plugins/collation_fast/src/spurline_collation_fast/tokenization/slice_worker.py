"""A slice worker: the process that encodes one slice of the rows and writes it to a file.

    python -m spurline_collation_fast.tokenization.slice_worker FOLDER NUMBER START STOP

Loads FOLDER/task.pickle, opens the datasets itself, appends blocks to FOLDER/slice-NUMBER and says so on standard
output, one JSON object a line. Standard input is a line to the parent: when it ends, so does the worker. Knows nothing
of the other workers; `slice_workers` is the other end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spurline import errors
from spurline_collation_fast.tokenization.block_encoder import BlockEncoder
from spurline_collation_fast.tokenization.chunks import RowLine
from spurline_collation_fast.tokenization.slice_task import SliceTask, UnsharableDataError

ROWS_PER_CHUNK = 64
"""Small, since many workers hold a chunk each and one thread gains nothing from more."""

Send = Callable[[dict[str, Any]], None]


def main() -> None:
    """Work on the slice named on the command line. Exits with 0 whenever the parent was told how it ended."""
    folder, number, start, stop = Path(sys.argv[1]), *map(int, sys.argv[2:])
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    send = _messages()
    try:
        task = SliceTask.load(task_path(folder))
        _encode(task, range(start, stop), slice_path(folder, number), send)
    except UnsharableDataError as error:
        send({"unsharable": str(error)})
    except errors.SpurlineError as error:
        send({"failed": {"kind": _known_kind(error), "message": str(error)}})
    else:
        send({"finished": True})


def task_path(folder: Path) -> Path:
    """Where the parent writes the task."""
    return folder / "task.pickle"


def slice_path(folder: Path, number: int) -> Path:
    """Where a worker writes its blocks."""
    return folder / f"slice-{number}"


def _encode(task: SliceTask, rows: range, path: Path, send: Send) -> None:
    encoder = BlockEncoder(task.datasets, task.tokenizer, task.data)
    line = RowLine([len(source.dataset) for source in task.datasets])
    with path.open("ab") as file:
        for block in encoder.blocks(line.chunks(rows, ROWS_PER_CHUNK)):
            try:
                header = block.write(file)
                # The parent reads what it is told of at once.
                file.flush()
            except OSError as error:
                raise errors.RunFailedError(
                    f"{path}: tokens of a worker cannot be written: {error.strerror or error}. Make room there, or "
                    "set tokenization.cache_dir (without a cache TMPDIR) to a folder with more."
                ) from error
            send({"block": header})


def _messages() -> Send:
    """Send to the parent; from here on nothing else reaches the channel, whatever a library prints."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    return send


def _end_with_parent(folder: Path) -> None:
    """Wait for the end of the parent, which closes our standard input, and end with it."""
    # Not sys.stdin: its lock, held here, would break the worker's own end.
    while os.read(0, 1):
        pass
    # The parent removes the folder when it can; after a kill nobody else would.
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _known_kind(error: errors.SpurlineError) -> str:
    """Name of the nearest class that the parent knows as well and that takes nothing but the text."""
    known = [kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
    return next(kind.__name__ for kind in known if "__init__" not in vars(kind))


if __name__ == "__main__":
    main()
