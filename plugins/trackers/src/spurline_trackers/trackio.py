"""Send metrics to Trackio: one run in a project, on this machine or in a Space.

Trackio finds a run by its name, which is kept in RUN_DIR/trackio_run_name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import TrackioTrackerConfig
from spurline_trackers.library import tracker_library
from spurline_trackers.sending import SendingTracker, earlier_run_id, new_run_id, store_run_id

ID_FILE = "trackio_run_name"
"""Name of the file inside the run directory that holds the name of the Trackio run."""


class TrackioTracker(SendingTracker):
    """Send metrics to a Trackio project."""

    name = "trackio"
    fix = "Make TRACKIO_DIR writable, or log in to the hub with `hf auth login` where trackers.trackio.space_id is set."

    def __init__(self, config: TrackioTrackerConfig) -> None:
        super().__init__()
        self._trackio = tracker_library("trackio")
        self._config = config
        self._run: Any = None

    def open_run(self, info: RunInfo) -> None:
        earlier = earlier_run_id(info, ID_FILE)
        name = earlier or store_run_id(info.run_dir, ID_FILE, new_run_id(info.run_dir, self._config.run_name))
        # Stdout belongs to the progress of the run.
        with redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                project=self._config.project,
                name=name,
                group=self._config.group,
                space_id=self._config.space_id,
                private=self._config.private,
                config=dict(info.config),
                resume="allow" if earlier else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close_run(self, *, is_finished: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()
