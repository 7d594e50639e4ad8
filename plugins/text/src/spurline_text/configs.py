"""Settings of the datasets, tokenizations and sources for text. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from spurline.config.objects import ObjectSetting
from spurline.config.paths import PathSetting
from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.source import SourceConfig, SourceFacts
from spurline.protocols.tokenization import TokenizationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spurline.config.run_config import ModelConfig


class HfDatasetConfig(DatasetConfig):
    """Rows that Hugging Face `datasets` can load: local files and folders, or a hub name."""

    retired: ClassVar[tuple[str, ...]] = ("max_row_mb", "max_expansion")

    name: str = "hf"
    path: Annotated[str, OnResume.FREE, PathSetting(reads=True), ObjectSetting("rows")] = Field(min_length=1)
    """A .jsonl, .json, .parquet, .arrow or .csv file, a folder of such files, a folder that `save_to_disk`
    wrote, or a hub name. A Python program can also give rows: a list of dicts, or a `datasets.Dataset`."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split string, such as `train`, `train[:1000]` or `train[10%:20%]`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    constants: dict[str, str | int | float | bool] = {}
    """Columns with the same value in all rows, such as `{environment: math}`. They replace columns of the file."""

    @property
    def place(self) -> str:
        return self.path


class HfStreamConfig(HfDatasetConfig):
    """Rows of JSON-lines or parquet files, or of a hub dataset, read one after another when they are needed. A hub
    dataset is not downloaded first. Use it with `source: stream`."""

    streams = True
    name: str = "hf_stream"
    split: str = "train"
    """Name of a split. The stream reads all its rows."""


class TextTokenizationConfig(TokenizationConfig):
    """Base settings of tokenizations that use a tokenizer of Hugging Face `transformers`."""

    def load_tokenizer(self, model: ModelConfig) -> PreTrainedTokenizerBase:
        from spurline_text.tokenizer import load_tokenizer

        return load_tokenizer(model)

    def notes(self, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
        from spurline_text.tokenizer import template_notes

        return template_notes(model, tokenizer)


class SequentialTokenizationConfig(TextTokenizationConfig):
    """Tokenize rows in order, in this process, and keep the samples in memory."""

    name: str = "sequential"


class StreamSourceConfig(SourceConfig):
    """Samples from data that is read only when it is needed. This source requires the setting `steps`."""

    name: str = "stream"
    buffer_rows: int = Field(default=10_000, gt=0)
    """Rows in one block. A whole block is in memory, and its samples are shuffled together. A resumed run reads at
    most one block again."""
    shuffle: bool = True
    """If false, samples keep the order of the data."""

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, reads_streams=True)

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.steps is None:
            yield Problem(
                "name", f"is {self.name}, and the length of a stream is not known. Set steps, and remove epochs."
            )
        if "order" in run.data.model_fields_set:
            yield Problem(
                "name",
                f"is {self.name}, which never has all samples in memory, so data.order: {run.data.order.name} cannot "
                "be used. Remove it. source.shuffle: false keeps the order of the data.",
            )
        for entry in run.data.train:
            if not entry.streams:
                yield Problem(
                    "name",
                    f"is {self.name}, but dataset '{entry.label or entry.name}' has name: {entry.name}, which is not a "
                    "stream. Set its name: hf_stream.",
                )


class SampleSourceConfig(SourceConfig):
    """Base of the sources whose samples are rows of the data."""

    carry: tuple[str, ...] = ()
    """Columns of the data with numbers or booleans, also of held-out data. A loss that lists such a column in `needs`
    gets it as a float32 column of the batch."""

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, carried=self.carry)


class SftSourceConfig(SampleSourceConfig):
    """Tokenized samples in the order of `data.order`, `batch_size` samples per step."""

    name: str = "sft"
