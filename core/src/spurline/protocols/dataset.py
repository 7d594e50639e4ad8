"""Kind `dataset`: rows of training or evaluation data, before tokenization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, Field

from spurline.config.objects import as_datasets
from spurline.config.section import Component, ComponentConfig, SchemaOfOneOrMany, as_list
from spurline.errors import Problem


class DatasetConfig(ComponentConfig):
    """Settings that all datasets share."""

    kind: ClassVar[str] = "dataset"
    streams: ClassVar[bool] = False
    """True if the component is a stream (`spurline_text.datasets.protocols`), which only some sources can read."""

    def problems(self, run: Any) -> Iterable[Problem]:
        if self.share is not None and "weight" in self.model_fields_set:
            yield Problem("share", "and weight are both set. Remove one.")
        if self.streams and not (run.source.facts.reads_streams and self in run.data.train):
            fix = "Set source: stream, or name: hf." if self in run.data.train else "Set name: hf."
            yield Problem(
                "name",
                f"is {self.name}, which streams its rows, but only data.train with source: stream reads a stream. "
                f"{fix}",
            )

    format: Literal["auto", "chat", "alpaca", "prompt_completion", "pretokenized", "text"] = "auto"
    """Format of the rows. `auto` decides by the column names of the first row."""
    columns: dict[str, str] = {}
    """Rename columns: the key is the name that Spurline expects (`messages`, `prompt`, ...), the value is the name in
    the file. Dots lead into objects, as in `{reference: reward_model.ground_truth}`."""
    append_eos: bool = True
    """Format `text`: end each row's text with the end-of-sequence token, which has loss."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Passes over this dataset in one epoch: 2 shows each row twice, 0.5 shows one half of the rows in one epoch and
    the other half in the next. The weight of a stream is its share of all rows, relative to the other weights."""
    share: float | None = Field(default=None, gt=0, le=1)
    """Part of an epoch's samples that come from this dataset, such as 0.7, whatever its size. Datasets with a `weight`
    divide the rest. Shares keep the number of samples per epoch, up to rounding. The share of a stream counts rows."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Stop the run at the first malformed row (`error`), or leave out and count malformed rows (`skip`)."""
    label: str | None = None
    """Short name in reports and row uids. The default is the file or hub name."""

    @property
    def place(self) -> str:
        """Return where the rows come from, as text for messages and reports."""
        return self.label or self.name


DatasetList = Annotated[
    tuple[Annotated[DatasetConfig, Component("dataset", shorthand="path")], ...],
    BeforeValidator(as_list),
    BeforeValidator(as_datasets),
    SchemaOfOneOrMany(),
]
"""Datasets. A single dataset may be written without a list around it."""


class Dataset(Protocol):
    """Random access to rows.

    Factory: `Class(config, registry=Registry)` with a DatasetConfig. A dataset of other datasets makes them with
    `registry.create("dataset", config.of, registry=registry)`. It raises DataError if the data cannot be found or read.
    The rows should be opened on first use, since only `label` and `fingerprint` are read if a cache has the tokens.
    Several processes can tokenize the dataset if it can be pickled, so it keeps the other datasets, not the registry.

    label: short name used in uids and reports.
    """

    label: str

    def __len__(self) -> int:
        """Return the number of rows after `split` was applied."""
        ...

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """Return the row at a 0-based index, with columns under their names in the file."""
        ...

    def location(self, row: int) -> str:
        """Return where a row comes from, for error messages: `train.jsonl:12` if the line is known."""
        ...

    def fingerprint(self) -> str:
        """Return a text that identifies the rows by their content, wherever they are stored."""
        ...


@dataclass(frozen=True)
class Longest:
    """The longest sequence in the data of a run, which is compared with the context length of the model.

    Attributes:
        tokens: Tokens of a sample, or of a prompt together with the longest response that is allowed.
        where: Location of its row.
        setting: Key path of the setting that limits `tokens`.
        prompt_tokens: Tokens of the prompt; the other tokens are generated. None for a sample.
    """

    tokens: int
    where: str
    setting: str
    prompt_tokens: int | None = None


class KnowsLongest(Protocol):
    """Data of a run whose longest sequence is known: a source, or an evaluation."""

    def longest(self) -> Longest | None:
        """Return the longest sequence in the data, or None if it is not known."""
        ...
