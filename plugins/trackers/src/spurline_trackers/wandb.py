"""Send metrics to Weights & Biases; the run's id is kept in RUN_DIR/wandb_run_id."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import WandbTrackerConfig
from spurline_trackers.library import tracker_library
from spurline_trackers.sending import SendingTracker, earlier_run_id, new_run_id, store_run_id

ID_FILE = "wandb_run_id"
"""Name of the file inside the run directory that holds the W&B run id."""

# By default W&B waits for its service without a limit at the end of a run.
_ENVIRONMENT = {"WANDB_FINISH_TIMEOUT": "30", "WANDB_FINISH_TIMEOUT_RAISES": "true"}


class WandbTracker(SendingTracker):
    """Send metrics to a W&B project. W&B keeps the first values of steps that a resumed run repeats."""

    name = "wandb"
    fix = "Log in with `wandb login`, set WANDB_API_KEY, or set mode: offline."

    def __init__(self, config: WandbTrackerConfig) -> None:
        super().__init__()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._wandb = tracker_library("wandb")
        self._config = config
        self._run: Any = None

    def open_run(self, info: RunInfo) -> None:
        run_id = earlier_run_id(info, ID_FILE) or store_run_id(info.run_dir, ID_FILE, new_run_id(info.run_dir))
        self._run = self._wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            name=self._config.display_name(info.run_dir),
            id=run_id,
            resume="allow",
            mode=self._config.mode,
            dir=str(info.run_dir),
            config=dict(info.config),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close_run(self, *, is_finished: bool) -> None:
        self._run.finish()
