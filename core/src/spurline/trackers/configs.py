"""Settings of core's trackers. Light: imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spurline.errors import ConfigError, Problem
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


class TensorboardTrackerConfig(TrackerConfig):
    """TensorBoard event files in RUN_DIR/tensorboard; needs `pip install spurline[tensorboard]`."""

    name: str = "tensorboard"


class WandbTrackerConfig(TrackerConfig):
    """Weights & Biases; needs `pip install spurline[wandb]`. A resumed run continues the same W&B run."""

    name: str = "wandb"
    project: str = "spurline"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""
    run_name: str | None = None
    """Display name; default is the run directory's name."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """`offline` writes locally, to be synced later."""


def missing_library(name: str, error: ImportError) -> ConfigError:
    """The error for tracker `name` whose library of that name cannot be imported."""
    text = (
        f"'{name}' needs the {name} library, which cannot be imported ({error}). Install it: "
        f"pip install 'spurline[{name}]'"
    )
    return ConfigError([Problem("trackers", text)])
