"""Send metrics to a run in a project of W&B, Trackio or SwanLab. The run's id is kept in the run directory."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any, Generic, TypeVar

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import (
    ProjectTrackerConfig,
    SwanlabTrackerConfig,
    TrackioTrackerConfig,
    WandbTrackerConfig,
)
from spurline_trackers.sending import SendingTracker, kept_run_id, new_run_id, tracker_library

# By default W&B waits at the end of a run until its service answers.
_WANDB_ENVIRONMENT = {"WANDB_FINISH_TIMEOUT": "30", "WANDB_FINISH_TIMEOUT_RAISES": "true"}

_Config = TypeVar("_Config", bound=ProjectTrackerConfig)


class ProjectTracker(SendingTracker, Generic[_Config]):
    """Base class of trackers whose library represents a run by an object with the methods `log` and `finish`."""

    def __init__(self, config: _Config) -> None:
        super().__init__()
        self._config = config
        self._library = tracker_library(self.name)
        self._run: Any = None

    @abstractmethod
    def options(self, info: RunInfo) -> dict[str, Any]:
        """Return arguments for the library's `init`, in addition to those that `open_run` gives to every library."""

    def open_run(self, info: RunInfo) -> None:
        # Stdout is reserved for the progress of the run.
        with redirect_stdout(sys.stderr):
            self._run = self._library.init(
                project=self._config.project, config=dict(info.config), resume="allow", **self.options(info)
            )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close_run(self, *, is_finished: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


class WandbTracker(ProjectTracker[WandbTrackerConfig]):
    """A tracker that sends metrics to a W&B project. If a resumed run repeats steps, W&B keeps the earlier values."""

    name = "wandb"
    fix = "Log in with `wandb login`, set WANDB_API_KEY, or set mode: offline."

    def options(self, info: RunInfo) -> dict[str, Any]:
        for name, value in _WANDB_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        return {
            "entity": self._config.entity,
            "name": self._config.display_name(info.run_dir),
            "id": kept_run_id(info, "wandb_run_id", partial(new_run_id, info.run_dir)),
            "mode": self._config.mode,
            "dir": str(info.run_dir),
        }


class TrackioTracker(ProjectTracker[TrackioTrackerConfig]):
    """A tracker that sends metrics to a Trackio project. Trackio uses the name of a run as its id."""

    name = "trackio"
    fix = "Make TRACKIO_DIR writable. If trackers.trackio.space_id is set, log in to the hub with `hf auth login`."

    def options(self, info: RunInfo) -> dict[str, Any]:
        new_name = partial(new_run_id, info.run_dir, self._config.run_name)
        return {
            "name": kept_run_id(info, "trackio_run_name", new_name),
            "group": self._config.group,
            "space_id": self._config.space_id,
            "private": self._config.private,
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }


class SwanlabTracker(ProjectTracker[SwanlabTrackerConfig]):
    """A tracker that sends metrics to a SwanLab experiment, or writes them for `swanlab sync` and `swanlab watch`.

    Each start of the run writes into a new folder in RUN_DIR/swanlab.
    """

    name = "swanlab"
    fix = "Log in with `swanlab login`, set SWANLAB_API_KEY, or set mode: offline."

    def options(self, info: RunInfo) -> dict[str, Any]:
        folder = info.run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        return {
            "workspace": self._config.workspace,
            "name": self._config.display_name(info.run_dir),
            "mode": self._config.mode,
            "tags": list(self._config.tags) or None,
            "id": kept_run_id(info, "swanlab_run_id", partial(secrets.token_hex, 10)),
            "log_dir": str(folder),
            # With these settings, SwanLab asks no questions and does not record the output of the run.
            "settings": self._library.Settings(interactive=False, terminal={"proxy_type": "none"}),
        }

    def open_run(self, info: RunInfo) -> None:
        hook = sys.excepthook
        super().open_run(info)
        # Remove SwanLab's hooks. At exit they could wait for a service that does not answer. `close_run` ends the run.
        sys.excepthook = hook
        atexit.unregister(self._run._handle_atexit)

    def close_run(self, *, is_finished: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish(state="success" if is_finished else "aborted")
