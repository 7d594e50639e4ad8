"""Kind `dataset`: rows of training or evaluation data, before tokenization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BeforeValidator, Field

from spurline.config.objects import as_datasets
from spurline.config.section import Component, ComponentConfig, SchemaOfOneOrMany, as_list
from spurline.errors import DataError, Problem


class DatasetConfig(ComponentConfig):
    """Settings of every dataset entry, whatever component loads the rows."""

    kind: ClassVar[str] = "dataset"
    streams: ClassVar[bool] = False
    """True if it is a `StreamedDataset`, which only a source that reads streams can use."""

    def problems(self, run: Any) -> Iterable[Problem]:
        if self.streams and not (run.source.facts.reads_streams and self in run.data.train):
            fix = "Set source: stream, or name: hf." if self in run.data.train else "Set name: hf."
            yield Problem(
                "name",
                f"is {self.name}, which streams its rows, and only data.train with source: stream reads a stream. "
                f"{fix}",
            )

    format: Literal["auto", "chat", "alpaca", "prompt_completion", "pretokenized", "text"] = "auto"
    """Format of the rows; `auto` decides by the column names of the first row."""
    columns: dict[str, str] = {}
    """Rename columns: key is the name Spurline expects (`messages`, `prompt`, ...), value the name in the file. Dots go
    into objects: `{reference: reward_model.ground_truth}`."""
    append_eos: bool = True
    """Format `text`: end each row's text with the end-of-sequence token, which has loss."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Passes over this dataset in one epoch: 2 shows each row twice, 0.5 shows half of the rows per epoch in turn. A
    stream has no epochs, so its weight is its share of all rows relative to the other weights."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Stop at the first malformed row, or leave it out and count it."""
    label: str | None = None
    """Short name in reports and row uids; default is the file or hub name."""

    @property
    def place(self) -> str:
        """Return where the rows are, for people."""
        return self.label or self.name


DatasetList = Annotated[
    tuple[Annotated[DatasetConfig, Component("dataset", shorthand="path")], ...],
    BeforeValidator(as_list),
    BeforeValidator(as_datasets),
    SchemaOfOneOrMany(),
]
"""Datasets; a single one may be written without a list around it."""


class Dataset(Protocol):
    """Random access to rows.

    Factory: `Class(config)`, config a DatasetConfig. Raises DataError when the data cannot be found or read. It may
    open rows late, since only `label` and `fingerprint` are read when the tokens are in a cache. A dataset that can be
    pickled is tokenized by several processes.

    label: short name used in uids and reports.
    """

    label: str

    def __len__(self) -> int:
        """Return the number of rows after `split` was applied."""
        ...

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """Return the row of a 0-based index, with columns under their names in the file."""
        ...

    def location(self, row: int) -> str:
        """Return where a row comes from, for error messages: `train.jsonl:12` where the line is known."""
        ...

    def fingerprint(self) -> str:
        """Return a text that changes with the rows. Equal content has an equal text, wherever it is stored."""
        ...


@dataclass(frozen=True)
class StreamedRow:
    """A row with its location for messages, or the DataError of a row that cannot be read."""

    values: Mapping[str, Any] | DataError
    location: str


class RowReader(Protocol):
    """Reads the rows of a stream once."""

    def read(self) -> StreamedRow | None:
        """Return the next row; None when there are no more. Deterministic: every reader gives the same rows."""
        ...

    def position(self) -> dict[str, Any]:
        """Return the position as JSON values. A reader that is opened there gives the remaining rows of this one."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


class StreamedDataset(Protocol):
    """Rows in order, for data that is too large to be looked at twice. Its config says `streams = True`.

    Factory: `Class(config)`, config a DatasetConfig. Raises DataError when the data cannot be found.

    label: short name used in uids and reports.
    """

    label: str

    def open(self, position: Mapping[str, Any] | None = None) -> RowReader:
        """Return a reader at the first row, or at the `position()` of an earlier reader."""
        ...


@dataclass(frozen=True)
class Longest:
    """The longest sequence in the data of a run, which is compared with the context length of the model.

    Attributes:
        tokens: Tokens of a sample, or of a prompt with the longest response.
        where: Location of its row.
        setting: Key path of the setting that bounds `tokens`.
        prompt_tokens: Tokens of the prompt, after which up to `tokens - prompt_tokens` are generated; None for a
            sample.
    """

    tokens: int
    where: str
    setting: str
    prompt_tokens: int | None = None


class KnowsLongest(Protocol):
    """Data of a run whose longest sequence is known: a source, or an evaluation."""

    def longest(self) -> Longest | None:
        """Return the longest sequence in the data, which may be shorter than its limit; None if it is not known."""
        ...


@runtime_checkable
class CheckableDataset(Protocol):
    """A dataset that can find unreadable rows faster than tokenization would."""

    def check(self) -> None:
        """Raise DataError for the first unreadable row."""
        ...
