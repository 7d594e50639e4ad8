"""Base of every backend's config: it must say its parallel layout before anything is loaded."""

from __future__ import annotations

from spurline.config.section import ComponentConfig
from spurline.protocols.collator import ParallelLayout


class BackendConfig(ComponentConfig):
    """Settings of a backend."""

    def layout(self) -> ParallelLayout:
        """What the parallelism asks of a batch; one process by default."""
        return ParallelLayout()
