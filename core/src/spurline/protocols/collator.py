"""Kind `collator`: lay tokenized samples out as one TrainingBatch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from spurline.data.batch import TrainingBatch
    from spurline.data.token_store import TokenView


class CollatorConfig(ComponentConfig):
    """Settings of a collator."""

    kind: ClassVar[str] = "collator"
    one_turn_per_row: ClassVar[bool] = False
    """True if the collator lays out rollouts, and puts each turn in its own row, so that a finished batch can be
    cut between prompts."""

    @property
    def row_capacity(self) -> int | None:
        """Return the tokens that one row can hold, padding included, or None if rows have no fixed limit."""
        return None

    @property
    def sample_alignment(self) -> int:
        """Return the multiple to which lengths of samples are rounded up, besides the backend's alignment."""
        return 1


@dataclass(frozen=True)
class ParallelLayout:
    """The requirements of a backend's parallelism for a batch.

    Attributes:
        data, tensor, context, pipeline: Sizes of the parallel groups.
        fp8: Whether matrices run in FP8.
        deals_rows: Whether the backend itself distributes a mini-batch's real rows over the ranks, even unequally.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    fp8: bool = False
    deals_rows: bool = False

    @property
    def align_to(self) -> int:
        """Return the multiple to which the length of each segment is rounded up."""
        base = 2 * self.tensor * self.context if self.context > 1 else self.tensor
        return math.lcm(base, 16 * self.context) if self.fp8 else base

    @property
    def row_multiple(self) -> int:
        """Return the multiple to which the number of rows of a mini-batch is padded."""
        return 1 if self.deals_rows else self.data


class Collator(Protocol):
    """Lay tokenized samples out as one TrainingBatch.

    Factory: `Class(config, pad_token_id=int, layout=ParallelLayout)`.
    A collator is deterministic and has no state between calls, so it may run on another thread. Padding has
    `input_ids` = pad_token_id and zero in every other column. The number of rows is a multiple of `layout.data`, and
    rank 0's rows come first, then rank 1's, and so on. `info` has `packing/fill` (real tokens / all positions). Raises
    DataError naming a sample that does not fit.
    """

    def collate(self, samples: TokenView, *, training: bool) -> TrainingBatch:
        """Return one batch with all samples, each in exactly one segment. `training` is False for evaluation."""
        ...
