"""Send metrics to SwanLab: one experiment, whose id is kept in RUN_DIR/swanlab_run_id.

Its files are in RUN_DIR/swanlab.
"""

from __future__ import annotations

import atexit
import secrets
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import SwanlabTrackerConfig
from spurline_trackers.library import tracker_library
from spurline_trackers.sending import SendingTracker, earlier_run_id, store_run_id

ID_FILE = "swanlab_run_id"
"""Name of the file inside the run directory that holds the SwanLab experiment's id."""
FOLDER = "swanlab"
"""Name of the folder inside the run directory; each start of the run has a folder of its own in it."""


class SwanlabTracker(SendingTracker):
    """Send metrics to a SwanLab experiment, or write them where `swanlab sync` and `swanlab watch` find them."""

    name = "swanlab"
    fix = "Log in with `swanlab login`, set SWANLAB_API_KEY, or set mode: offline."

    def __init__(self, config: SwanlabTrackerConfig) -> None:
        super().__init__()
        self._swanlab = tracker_library("swanlab")
        self._config = config
        self._run: Any = None

    def open_run(self, info: RunInfo) -> None:
        run_id = earlier_run_id(info, ID_FILE) or store_run_id(info.run_dir, ID_FILE, secrets.token_hex(10))
        folder = info.run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        hook = sys.excepthook
        with redirect_stdout(sys.stderr):
            self._run = self._swanlab.init(
                project=self._config.project,
                workspace=self._config.workspace,
                name=self._config.display_name(info.run_dir),
                mode=self._config.mode,
                tags=list(self._config.tags) or None,
                id=run_id,
                resume="allow",
                log_dir=str(folder),
                config=dict(info.config),
                # No questions, and the output of the run stays its own.
                settings=self._swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
            )
        # The run reports its own end, and a service that does not answer must not keep the process alive.
        sys.excepthook = hook
        atexit.unregister(self._run._handle_atexit)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close_run(self, *, is_finished: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish(state="success" if is_finished else "aborted")
