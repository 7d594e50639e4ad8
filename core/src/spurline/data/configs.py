"""Settings of core's collators, orders, prefetch and mini-batches. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.errors import Problem
from spurline.protocols.collator import CollatorConfig
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.protocols.order import OrderConfig
from spurline.protocols.prefetch import PrefetchConfig


class PaddedCollatorConfig(CollatorConfig):
    """One sample per row, padded to the length of the longest sample."""

    name: str = "padded"
    pad_side: Literal["right", "left"] = "right"
    """Side on which shorter rows are filled."""
    pad_to_multiple_of: int = Field(default=1, gt=0)
    """Round the row length up to a multiple of this."""


class PackedCollatorConfig(CollatorConfig):
    """Several samples per row. No sample attends to another sample in its row."""

    name: str = "packed"
    max_tokens: int = Field(default=8192, gt=0)
    """Tokens in one packed row, padding and alignment included."""
    align_to: int = Field(default=1, gt=0)
    """Round each sample's length up to a multiple of this and of the backend's own alignment."""
    pad_to_max: bool = False
    """Make every row exactly `max_tokens` long. Otherwise, rows are as long as the fullest row."""
    algorithm: Literal["auto", "ffd", "multifit"] = "auto"
    """`ffd` is first-fit-decreasing. `multifit` balances the rows of all ranks, so that no rank waits for others.
    `auto` is `multifit` if several ranks share a batch, else `ffd`."""

    @property
    def row_capacity(self) -> int:
        return self.max_tokens

    def algorithm_for(self, num_ranks: int) -> Literal["ffd", "multifit"]:
        """Return the algorithm for a batch that is shared by `num_ranks` ranks."""
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


class SerialPrefetchConfig(PrefetchConfig):
    """Build each batch when its step begins, on the loop's thread."""

    name: str = "serial"


class WholeBatchConfig(MiniBatchesConfig):
    """One optimizer step per batch."""

    name: str = "whole"

    def minibatch_prompts(self, prompts_per_step: int) -> int:
        return prompts_per_step


class UniformOrderConfig(OrderConfig):
    """A new random order in each epoch."""

    name: str = "uniform"


class SequentialOrderConfig(OrderConfig):
    """The order of the files, dataset after dataset, the same in each epoch."""

    name: str = "sequential"


class LengthGroupedOrderConfig(OrderConfig):
    """Samples of similar length share a batch, and batches come in random order.

    Batches with samples of two epochs are not grouped by length.
    """

    reads_lengths = True

    name: str = "length_grouped"
    pool_batches: int = Field(default=50, gt=0)
    """Number of batches whose samples are drawn at random and then sorted by length together. With a larger number,
    lengths within a batch are more alike; with a smaller one, batches are more random."""


class CurriculumOrderConfig(OrderConfig):
    """Samples of each epoch in the order of the numbers in a column, such as a difficulty. Ties are shuffled."""

    name: str = "curriculum"
    column: str = Field(min_length=1)
    """Name of the column with the difficulty, as in the file. Dots lead into objects, as in `meta.difficulty`."""
    direction: Literal["ascending", "descending"] = "ascending"
    """Begin each epoch with small numbers (`ascending`) or with large ones."""
    stages: int | None = Field(default=None, gt=0)
    """Cut each sorted epoch into this many stages of equal size, and shuffle within each stage. Null disables this."""
