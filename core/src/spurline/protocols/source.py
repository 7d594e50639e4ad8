"""Kind `source`: where the batches of a run come from. SFT, synchronous and async RL differ only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from spurline.data.batch import TrainingBatch
    from spurline.protocols.backend import Backend


class BatchSource(Protocol):
    """Supply one TrainingBatch per loop step.

    Factory: `Class(config, context=SourceContext)`; see `spurline.run_context.SourceContext`. It reads its data there,
    but starts nothing. A source with state between steps also implements `Stateful`; its state may hold a fingerprint
    of the data, so that a resume on other data is refused.
    """

    total_steps: int
    """Loop steps of the whole run."""

    pure: bool
    """True when `build(step)` is a pure function of (config, step), so that it may run ahead on another thread."""

    def summary(self) -> Mapping[str, object]:
        """JSON-able facts about the data for `spurline plan` and the report; see `spurline.data.summary`."""
        ...

    def start(self, step: int, backend: Backend) -> None:
        """Called once, after the checkpoint was loaded, before the batch of `step` (the first to run) is built."""
        ...

    def build(self, step: int) -> TrainingBatch:
        """The batch of this 1-based step."""
        ...

    def epoch(self, step: int) -> float:
        """Passes over the data completed when this step is done."""
        ...

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        """Called after the update of a step; RL publishes weights here. Returns metrics."""
        ...

    def close(self) -> None:
        """Stop all work of the source."""
        ...


@runtime_checkable
class GivesUpPrompts(Protocol):
    """A source that leaves prompts out after repeated failures, and can say which and why."""

    def given_up(self) -> Sequence[str]:
        """One line for each so far, with the place of the row and the error; for summary.json and the report."""
        ...
