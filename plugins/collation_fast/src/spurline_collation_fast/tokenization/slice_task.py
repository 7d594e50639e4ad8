"""What a slice worker needs to know, and how it gets there.

In: datasets, tokenizer and settings of the parent. Out: one file that every worker of a run loads. Rows do not travel:
a dataset says with its pickled form how to find them again, and a tokenizer with its own JSON.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.config.section import Section
from spurline.protocols.tokenization import DatasetToTokenize


class UnsharableDataError(Exception):
    """A dataset or tokenizer that another process cannot have. The text says why."""


@dataclass(frozen=True)
class SliceTask:
    """The same for all workers; each is told its rows on the command line."""

    datasets: Sequence[DatasetToTokenize]
    tokenizer: PreTrainedTokenizerBase
    data: DataConfig

    def save(self, path: Path) -> None:
        """Raises UnsharableDataError when something in it cannot be pickled."""
        with path.open("wb") as file:
            try:
                _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(self)
            except OSError:
                raise
            except Exception as error:  # a foreign class may raise anything while it is taken apart
                raise UnsharableDataError(f"{type(error).__name__}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> SliceTask:
        """Raises UnsharableDataError when a class in it is not found by its module and name, say in `__main__`."""
        with path.open("rb") as file:
            try:
                task = pickle.load(file)  # noqa: S301 - the parent's own file, in a folder of this user alone
            except Exception as error:
                raise UnsharableDataError(f"{type(error).__name__}: {error}") from error
        assert isinstance(task, cls), type(task)
        return task


class _Pickler(pickle.Pickler):
    """Knows the config classes that were put together for one run and exist in no module."""

    def __init__(self, file: BinaryIO, protocol: int) -> None:
        super().__init__(file, protocol)

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
