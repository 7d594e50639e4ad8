"""Kind `source`: where the batches of a run come from. SFT, synchronous and async RL differ only here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from spurline.data.batch import TrainingBatch
    from spurline.protocols.backend import Backend


class BatchSource(Protocol):
    """Supply one TrainingBatch per loop step.

    Factory: `Class(config, context=SourceContext)`; see `spurline.run_context.SourceContext`.
    """

    total_steps: int
    """Loop steps of the whole run."""

    pure: bool
    """True when `build(step)` is a pure function of (config, step), so that it may run ahead on another thread."""

    def build(self, step: int) -> TrainingBatch:
        """The batch of this 1-based step."""
        ...

    def epoch(self, step: int) -> float:
        """Passes over the data completed when this step is done."""
        ...

    def after_update(self, step: int, backend: Backend) -> Mapping[str, float]:
        """Called after the update of a step; RL publishes weights here. Returns metrics."""
        ...

    def state_dict(self) -> dict[str, object]:
        """JSON-able state for the checkpoint; empty for a pure source."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""
        ...

    def close(self) -> None:
        """Stop all work of the source."""
        ...
