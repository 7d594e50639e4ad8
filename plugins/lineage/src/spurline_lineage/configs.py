"""Settings of the section `lineage`. This module imports no torch."""

from __future__ import annotations

from pydantic import Field

from spurline.config.section import Section


class LineageConfig(Section):
    """Settings of the hashes that each step adds to RUN_DIR/lineage.jsonl."""

    weights_every_steps: int = Field(default=1, gt=0)
    """Hash the weights each time this many steps are done. Rows and rollouts are hashed in every step."""
