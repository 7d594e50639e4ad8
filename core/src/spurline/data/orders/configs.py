"""Settings of core's orders. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spurline.protocols.order import OrderConfig


class UniformOrderConfig(OrderConfig):
    """Each epoch in a random order of its own."""

    name: str = "uniform"


class SequentialOrderConfig(OrderConfig):
    """The order of the files, dataset after dataset, the same in each epoch."""

    name: str = "sequential"


class LengthGroupedOrderConfig(OrderConfig):
    """Samples of similar length share a batch, and batches come in random order.

    Only the batch in which two epochs meet is mixed, as it belongs to both.
    """

    reads_lengths = True

    name: str = "length_grouped"
    pool_batches: int = Field(default=50, gt=0)
    """Batches whose samples are drawn at random and then sorted by length together. More make lengths within a batch
    more alike, fewer make batches more random."""


class CurriculumOrderConfig(OrderConfig):
    """The order of a column's numbers, from the easiest sample to the hardest in each epoch; ties are shuffled."""

    name: str = "curriculum"
    column: str = Field(min_length=1)
    """Column of the rows that holds the difficulty, under its name in the file. Dots lead into objects:
    `meta.difficulty`."""
    direction: Literal["ascending", "descending"] = "ascending"
    """The numbers that come first, small or large ones."""
    stages: int | None = Field(default=None, gt=0)
    """Cut each epoch into this many stages of equal size, each harder than the one before and shuffled within; null
    sorts the whole epoch."""
