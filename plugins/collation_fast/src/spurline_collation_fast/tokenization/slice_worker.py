"""A slice worker: what it is told, and what it does.

The parent saves one SliceTask for all workers of a run. Each loads it, opens the datasets itself, encodes its slice of
the rows, appends the blocks to a file, and tells the parent about every one. Rows do not travel: a dataset says with
its pickled form how to find them again, and a tokenizer with its own JSON. A worker knows nothing of the others;
`slice_workers` is the other end.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline import errors
from spurline.child import Parent
from spurline.config.run_config import DataConfig
from spurline.config.section import Section
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.tokenization.block_encoder import BlockEncoder
from spurline_collation_fast.tokenization.chunks import RowLine, write_block

ROWS_PER_CHUNK = 64
"""Small, since many workers hold a chunk each and one thread gains nothing from more."""


class UnsharableDataError(Exception):
    """A dataset or tokenizer that another process cannot have. The text says why."""


@dataclass(frozen=True)
class SliceTask:
    """The same for all workers; each is told its rows as arguments."""

    datasets: Sequence[DatasetToTokenize]
    tokenizer: PreTrainedTokenizerBase
    data: DataConfig

    def save(self, folder: Path) -> None:
        """Raises UnsharableDataError when something in it cannot be pickled."""
        with _task_path(folder).open("wb") as file:
            try:
                _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(self)
            except OSError:
                raise
            except Exception as error:  # a foreign class may raise anything while it is taken apart
                raise UnsharableDataError(f"{type(error).__name__}: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> SliceTask:
        """Raises UnsharableDataError when a class in it is not found by its module and name, say in `__main__`."""
        with _task_path(folder).open("rb") as file:
            try:
                task = pickle.load(file)  # noqa: S301 - the parent's own file, in a folder of this user alone
            except Exception as error:
                raise UnsharableDataError(f"{type(error).__name__}: {error}") from error
        assert isinstance(task, cls), type(task)
        return task


def main(parent: Parent) -> None:
    """Work on the slice FOLDER NUMBER START STOP. Ends well whenever the parent was told how it went."""
    folder, number, start, stop = Path(parent.arguments[0]), *map(int, parent.arguments[1:])
    try:
        _encode(SliceTask.load(folder), range(start, stop), slice_path(folder, number), parent)
    except UnsharableDataError as error:
        parent.send({"unsharable": str(error)})
    except errors.SpurlineError as error:
        parent.send({"failed": {"kind": _known_kind(error), "message": str(error)}})
    else:
        parent.send({"finished": True})


def slice_path(folder: Path, number: int) -> Path:
    """Where a worker writes its blocks."""
    return folder / f"slice-{number}"


def _task_path(folder: Path) -> Path:
    return folder / "task.pickle"


def _encode(task: SliceTask, rows: range, path: Path, parent: Parent) -> None:
    encoder = BlockEncoder(task.datasets, task.tokenizer, task.data)
    line = RowLine([len(source.dataset) for source in task.datasets])
    with path.open("ab") as file:
        for block in encoder.blocks(line.chunks(rows, lambda: ROWS_PER_CHUNK)):
            try:
                header = write_block(block, file)
                # The parent reads what it is told of at once.
                file.flush()
            except OSError as error:
                raise errors.RunFailedError(
                    f"{path}: tokens of a worker cannot be written: {error.strerror or error}. Make room there, or "
                    "set tokenization.cache_dir (without a cache TMPDIR) to a folder with more."
                ) from error
            parent.send({"block": header})


def _known_kind(error: errors.SpurlineError) -> str:
    """Name of the nearest class that the parent knows as well and that takes nothing but the text."""
    known = [kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
    return next(kind.__name__ for kind in known if "__init__" not in vars(kind))


class _Pickler(pickle.Pickler):
    """Knows the config classes that were put together for one run and exist in no module."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Section):
            return _restore, (_written_class(type(value)), value.__getstate__())
        return NotImplemented


def _written_class(kind: type[Section]) -> type[Section]:
    """The class as its author wrote it: the nearest base that its module has under its name."""
    for base in kind.__mro__:
        if getattr(sys.modules.get(base.__module__), base.__qualname__, None) is base:
            return base
    raise AssertionError(f"Section itself is in its module, but is no base of {kind}")


def _restore(kind: type[Section], state: dict[Any, Any]) -> Section:
    section = kind.__new__(kind)
    section.__setstate__(state)
    return section
