"""Tokenized data as sources and evaluation draw batches from it, whatever makes up one sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from spurline.data.batch import TrainingBatch
    from spurline.protocols.tokenization import DatasetToTokenize


class Samples(Protocol):
    """Samples counted from 0, dataset after dataset. Pure: any batch can be made at any time, on any thread."""

    def sizes(self) -> tuple[int, ...]:
        """Number of samples from each dataset."""
        ...

    def batch(self, numbers: NDArray[np.int64], *, training: bool) -> TrainingBatch:
        """These samples as one batch; repeats are allowed."""
        ...

    def fingerprint(self) -> str:
        """Changes when any token, mask or border of a sample does."""
        ...

    def summary(self) -> dict[str, Any]:
        """JSON-able facts; see `spurline.data.summary`."""
        ...

    def answered(self) -> Sequence[DatasetToTokenize]:
        """The datasets as rows of a prompt with its answer, for held-out generation."""
        ...


@runtime_checkable
class ReadsHeldOut(Protocol):
    """A source that reads `data.eval` in its own way, because its samples are not one row's tokens."""

    def held_out(self) -> Samples:
        """The samples of `data.eval`; asked for once, and only when there is held-out data."""
        ...
