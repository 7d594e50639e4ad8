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
                f"is {self.name}, whose rows come one after another; only data.train with source: stream reads them "
                f"so. {fix}",
            )

    format: Literal["auto", "chat", "alpaca", "prompt_completion", "pretokenized", "text"] = "auto"
    """How a row is read; `auto` decides from the column names of the first row."""
    columns: dict[str, str] = {}
    """Rename columns: key is the name Spurline expects (`messages`, `prompt`, ...), value the name in the file. Dots go
    into objects: `{reference: reward_model.ground_truth}`."""
    append_eos: bool = True
    """Format `text`: end each row's text with the end-of-sequence token, which has loss."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Passes over this dataset in one epoch: 2 shows each row twice, 0.5 shows half of the rows per epoch in turn. Of a
    stream, which has no epochs: its share of all rows beside the other weights."""
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

    Factory: `Class(config)`, config a DatasetConfig. Raises DataError when the data cannot be found or read. May open
    rows late: `label` and `fingerprint` are all that is asked for when the tokens are in a cache. A dataset that can
    be pickled is tokenized by several processes.

    label: short name used in uids and reports.
    """

    label: str

    def __len__(self) -> int:
        """Number of rows after `split` was applied."""
        ...

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """One row by 0-based index, columns under the names in the file."""
        ...

    def location(self, row: int) -> str:
        """Return where a row comes from, for error messages: `train.jsonl:12` where the line is known."""
        ...

    def fingerprint(self) -> str:
        """Changes when the rows do; equal for equal content wherever it is stored."""
        ...


@dataclass(frozen=True)
class StreamedRow:
    """A row, or the DataError of one that cannot be read, and where it is, for messages."""

    values: Mapping[str, Any] | DataError
    location: str


class RowReader(Protocol):
    """Reads the rows of a stream once."""

    def read(self) -> StreamedRow | None:
        """Return the next row; None when there are no more. Deterministic: every reader gives the same rows."""
        ...

    def position(self) -> dict[str, Any]:
        """Return its position as JSON values: a reader opened there gives the rows that this one still would."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


class StreamedDataset(Protocol):
    """Rows in order, for data that is too large to be looked at twice. Its config says `streams = True`.

    Factory: `Class(config)`, config a DatasetConfig. Raises DataError when the data cannot be found.

    label: short name used in uids and reports.
    """

    label: str

    def open(self, position: Mapping[str, Any] | None = None) -> RowReader:
        """Return a reader at the first row, or at a position that a reader told."""
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
