"""Base of every backend's config: it must say its parallel layout before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.config.section import ComponentConfig
from spurline.protocols.collator import ParallelLayout

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class BackendConfig(ComponentConfig):
    """Settings of a backend."""

    def layout(self) -> ParallelLayout:
        """What the parallelism asks of a batch; one process by default."""
        return ParallelLayout()

    def missing_here(self) -> str | None:
        """What this machine lacks for training with these settings, as a sentence; None when it lacks nothing."""
        return None

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        """Bytes on the fullest device by part, for a step of so many tokens in rows of this length; {} if unknown."""
        return {}
