"""Settings of core's datasets, tokenization, collators, prefetch and sources of data. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.objects import ObjectSetting
from spurline.config.paths import PathSetting
from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import DataError, Problem
from spurline.protocols.collator import CollatorConfig
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.prefetch import PrefetchConfig
from spurline.protocols.source import SourceConfig
from spurline.protocols.tokenization import TokenizationConfig


@dataclass(frozen=True)
class TableLimits:
    """What files of others may hold. max_expansion: size of a table in terms of its file's. checks_keys: whether a
    repeated key is looked for whenever a row is read; otherwise once, when all rows are checked."""

    max_row_bytes: int
    max_expansion: int
    checks_keys: bool = False

    def too_large_row(self, location: str) -> DataError:
        """The error of a row that is larger."""
        return DataError(
            f"{location}: a row has more than {self.max_row_bytes:,} bytes. Divide it, leave it out, or raise "
            "max_row_mb of this dataset."
        )


class HfDatasetConfig(DatasetConfig):
    """Rows that Hugging Face `datasets` can load: local files and folders, or a hub name."""

    name: str = "hf"
    path: Annotated[str, OnResume.FREE, PathSetting(reads=True), ObjectSetting("rows")] = Field(min_length=1)
    """A .jsonl, .json, .parquet, .arrow or .csv file, a folder of such files or of `save_to_disk`, or a hub name.
    From Python also rows: a list of dicts, or a `datasets.Dataset`."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split string, such as `train`, `train[:1000]` or `train[10%:20%]`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    max_row_mb: Annotated[int, OnResume.BY_NAME] = Field(default=64, gt=0)
    """MiB that one row of a local file may have: larger ones are malformed, and may take all memory."""
    max_expansion: Annotated[int, OnResume.FREE] = Field(default=1000, gt=0)
    """How many times its own size a local parquet file may have once it is read; 4 GiB are always allowed."""

    @property
    def limits(self) -> TableLimits:
        return TableLimits(self.max_row_mb << 20, self.max_expansion, checks_keys=self.on_bad_row == "skip")

    @property
    def place(self) -> str:
        return self.path


class HfStreamConfig(HfDatasetConfig):
    """Rows read one after another, as they are needed: JSON lines and parquet files, or a hub dataset that stays on the
    hub. For `source: stream`."""

    streams = True
    name: str = "hf_stream"
    split: str = "train"
    """Name of a split; a stream takes all of it."""


class SequentialTokenizationConfig(TokenizationConfig):
    """One sample after another, in this process, into memory."""

    name: str = "sequential"


class PaddedCollatorConfig(CollatorConfig):
    """One sample per row, padded to the longest."""

    name: str = "padded"
    pad_side: Literal["right", "left"] = "right"
    """Side on which shorter rows are filled."""
    pad_to_multiple_of: int = Field(default=1, gt=0)
    """Round the row length up to a multiple of this."""


class PackedCollatorConfig(CollatorConfig):
    """Several samples per row; no sample sees its neighbour."""

    name: str = "packed"
    max_tokens: int = Field(default=8192, gt=0)
    """Tokens in one packed row, padding and alignment included."""
    align_to: int = Field(default=1, gt=0)
    """Round each sample's length up to a multiple of this; the backend's own alignment is applied on top."""
    pad_to_max: bool = False
    """Make every row exactly `max_tokens` long; otherwise rows are as long as the fullest one."""
    algorithm: Literal["auto", "ffd", "bfd", "multifit"] = "auto"
    """First-fit-decreasing; best-fit-decreasing; or first-fit-decreasing with rows evened out over all ranks. `auto` is
    `multifit` where several ranks share a batch, which would wait for each other, and else `ffd`."""

    @property
    def row_capacity(self) -> int:
        return self.max_tokens

    def algorithm_for(self, num_ranks: int) -> Literal["ffd", "bfd", "multifit"]:
        """num_ranks: that share a batch."""
        if self.algorithm != "auto":
            return self.algorithm
        return "multifit" if num_ranks > 1 else "ffd"

    @property
    def sample_alignment(self) -> int:
        return self.align_to

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if run.collator is self and run.data.max_length > self.max_tokens:
            yield Problem(
                "max_tokens",
                f"is {self.max_tokens}, but data.max_length allows samples of {run.data.max_length} tokens. "
                f"Set data.max_length: {self.max_tokens}, or raise collator.max_tokens.",
            )


class RolloutsCollatorConfig(PaddedCollatorConfig):
    """One turn of a trajectory per row."""

    one_turn_per_row = True
    name: str = "rollouts"


class SerialPrefetchConfig(PrefetchConfig):
    """Build each batch when its step begins, on the loop's thread."""

    name: str = "serial"


class SftSourceConfig(SourceConfig):
    """Tokenized samples, `batch_size` of them a step, in the order that `data.order` says."""

    name: str = "sft"


class StreamSourceConfig(SourceConfig):
    """Samples of data that is read as it is needed, shuffled within blocks of rows; needs `steps`."""

    reads_streams = True
    name: str = "stream"
    buffer_rows: int = Field(default=10_000, gt=0)
    """Rows that are held at once. Their samples are shuffled among each other, and a resume reads up to so many rows
    again."""
    shuffle: bool = True
    """Whether they are; off keeps the order of the data."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.steps is None:
            yield Problem(
                "name", f"is {self.name}, and nobody knows how long a stream is. Set steps, and remove epochs."
            )
        if "order" in run.data.model_fields_set:
            yield Problem(
                "name",
                f"is {self.name}, which never holds all samples, so data.order: {run.data.order.name} has nothing to "
                "put in order. Remove it; source.shuffle: false keeps the order of the data.",
            )
        for entry in run.data.train:
            if not entry.streams:
                yield Problem(
                    "name",
                    f"is {self.name}, but dataset '{entry.label or entry.name}' is of name: {entry.name}, which holds "
                    "its rows. Set its name: hf_stream.",
                )


class PreferenceSourceConfig(SourceConfig):
    """Pairs of a chosen and a rejected answer to a prompt; `batch_size` counts pairs. Its loss is `dpo`."""

    supplies = "pairs"
    compares_logprobs = True
    run_defaults: ClassVar[Mapping[str, str]] = {"loss": "dpo"}

    name: str = "preference"

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.loss.trains_on == "tokens":
            yield Problem(
                "name",
                f"is {self.name}, but loss: {run.loss.name} would train on rejected answers as on chosen ones. Set "
                "loss: dpo, or remove the line.",
            )
        if run.reduction.name == "fixed_norm":
            yield Problem(
                "name",
                f"is {self.name}, whose pairs all count the same, but reduction: fixed_norm counts tokens. Remove it.",
            )
        if run.data.too_long == "split":
            yield Problem(
                "name",
                f"is {self.name}, but data.too_long: split would cut an answer in two, and no half of it belongs to a "
                "pair. Set data.too_long to truncate, drop or error.",
            )
        for entry in (*run.data.train, *run.data.eval):
            if entry.format not in ("auto", "prompt_completion"):
                yield Problem(
                    "name",
                    f"is {self.name}, which reads prompt, chosen and rejected, but a dataset has format: "
                    f"{entry.format}. Remove it; `columns` renames columns.",
                )
        capacity = run.collator.row_capacity
        if capacity is not None and run.data.max_length <= capacity < 2 * run.data.max_length:
            yield Problem(
                "name",
                f"is {self.name}, and a pair may have twice data.max_length: {2 * run.data.max_length} tokens, but "
                f"collator.max_tokens is {capacity}. Set data.max_length: {capacity // 2}, or raise "
                "collator.max_tokens.",
            )
