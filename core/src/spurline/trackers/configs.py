"""Settings of core's trackers. Light: imports no torch."""

from __future__ import annotations

from pydantic import Field

from spurline.protocols.tracker import TrackerConfig


class JsonlTrackerConfig(TrackerConfig):
    """The file RUN_DIR/metrics.jsonl, with one object per step. This tracker is always on."""

    name: str = "jsonl"


class ConsoleTrackerConfig(TrackerConfig):
    """Progress as a live bar, or as plain lines if output is not a terminal. This tracker is always on."""

    name: str = "console"
    every_steps: int = Field(default=10, gt=0)
    """Print a plain line each time this many steps are done."""
    start_lines: bool = True
    """Print on stderr what will run, and what is done while it starts; set it to false in scripts."""

    @property
    def silences_start(self) -> bool:
        return not self.start_lines
