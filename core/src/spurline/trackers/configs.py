"""Settings of core's trackers. Light: imports no torch."""

from __future__ import annotations

from pydantic import Field

from spurline.protocols.tracker import TrackerConfig


class JsonlTrackerConfig(TrackerConfig):
    """RUN_DIR/metrics.jsonl, one object per step; always on."""

    name: str = "jsonl"


class ConsoleTrackerConfig(TrackerConfig):
    """Progress on the terminal: a live bar, or plain lines when output is not a terminal; always on."""

    name: str = "console"
    every_steps: int = Field(default=10, gt=0)
    """Plain lines: print one each time this many steps are done."""
    start_lines: bool = True
    """Say on stderr what is about to run, and what the start is doing; off for scripts that want silence."""

    @property
    def silences_start(self) -> bool:
        return not self.start_lines
