"""Settings of core's trackers. This module imports no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from spurline.protocols.tracker import TrackerConfig


class JsonlTrackerConfig(TrackerConfig):
    """The file RUN_DIR/metrics.jsonl, with one JSON object per step. This tracker is always on."""

    name: str = "jsonl"


class ConsoleTrackerConfig(TrackerConfig):
    """Progress as a live bar, or as plain lines if the output is not a terminal. This tracker is always on."""

    name: str = "console"
    retired: ClassVar[tuple[str, ...]] = ("start_lines",)
    every_steps: int = Field(default=10, gt=0)
    """Print a plain line each time this many steps are done."""
