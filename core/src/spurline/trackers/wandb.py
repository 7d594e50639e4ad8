"""Weights & Biases. A resumed run continues the same W&B run, whose id is kept in RUN_DIR/wandb_run_id.

The library is imported when the tracker is built, not when this module is.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from spurline.errors import ConfigError, Problem
from spurline.protocols.tracker import RunInfo
from spurline.trackers.configs import WandbTrackerConfig, missing_library
from spurline.trackers.run_id import stored_run_id

ID_FILE = "wandb_run_id"
"""Name of the file inside the run directory that holds the W&B run id."""


class WandbTracker:
    """Send metrics to a W&B project.

    W&B cannot take back steps: after a resume it keeps what the earlier attempt logged for steps that are repeated,
    and goes on from there.
    """

    def __init__(self, config: WandbTrackerConfig) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise missing_library("wandb", error) from error
        self._config = config
        self._run: Any = None

    def start(self, info: RunInfo) -> None:
        """Open the W&B run. Raises ConfigError when W&B refuses, for example without an API key."""
        assert self._run is None, "WandbTracker is already started"
        run_id = stored_run_id(info.run_dir, ID_FILE, is_resumed=info.is_resumed)
        try:
            self._run = self._wandb.init(
                project=self._config.project,
                entity=self._config.entity,
                name=self._config.run_name or info.run_dir.resolve().name,
                id=run_id,
                resume="allow",
                mode=self._config.mode,
                dir=str(info.run_dir),
                config=dict(info.config),
            )
        except self._wandb.Error as error:
            refused = (
                f"'wandb' cannot start a run: {error} Log in with `wandb login`, set WANDB_API_KEY, or set mode: "
                "offline."
            )
            raise ConfigError([Problem("trackers", refused)]) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send all metrics of one step under their own names."""
        assert self._run is not None, "WandbTracker.log before start or after close"
        self._run.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def flush(self) -> None:
        """Nothing to do: W&B's own process sends, or in offline mode writes, what it was given."""

    def close(self) -> None:
        """Finish the upload. May be called twice."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
