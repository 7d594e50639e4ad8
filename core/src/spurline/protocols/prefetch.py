"""Kind `prefetch`: decide when the batch of a step is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from spurline.data.batch import TrainingBatch


class PrefetchConfig(ComponentConfig):
    """Settings of a prefetch."""

    kind: ClassVar[str] = "prefetch"


class Prefetch(Protocol):
    """Serve the batches of consecutive steps, built by `build(step)`.

    Factory: `Class(config, build=Callable[[int], TrainingBatch], last_step=int)`. `build` is a pure function of the
    step. Implementations differ only in when they build a batch.
    """

    def start(self, step: int) -> None:
        """Begin at this 1-based step. Batches that were built for other steps are discarded."""
        ...

    def next(self, step: int) -> TrainingBatch:
        """Return the batch of this step. Steps are asked for in order. An error of `build(step)` is raised here."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return numbers about the last served batch, such as `time/collate_wait` in seconds."""
        ...

    def close(self) -> None:
        """Stop all work, and end all threads. Do not raise the error of a batch that was not asked for."""
        ...


BuildBatch = Callable[[int], "TrainingBatch"]
