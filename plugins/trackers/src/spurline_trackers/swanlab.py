"""SwanLab: one experiment, whose id is kept in RUN_DIR/swanlab_run_id; its files are in RUN_DIR/swanlab.

The library is imported when the tracker is built, not when this module is.
"""

from __future__ import annotations

import atexit
import importlib
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import SwanlabTrackerConfig
from spurline_trackers.library import tracker_library
from spurline_trackers.run_id import earlier_run_id, store_run_id
from spurline_trackers.sending import NO_STEP, LastStep, SendingTracker

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

    def open_run(self, info: RunInfo) -> LastStep:
        earlier = earlier_run_id(info, ID_FILE)
        folder = info.run_dir / FOLDER
        steps = last_steps(folder, earlier) if earlier is not None and self._config.mode != "online" else {}
        run_id = earlier or store_run_id(info.run_dir, ID_FILE, secrets.token_hex(10))
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
        # How the run ends is said once, and whether that can be sent keeps no process alive.
        sys.excepthook = hook
        atexit.unregister(self._run._handle_atexit)
        # Online, SwanLab asks its service itself, and drops what that holds.
        return lambda name: steps.get(name, NO_STEP)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close_run(self, *, is_finished: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish(state="success" if is_finished else "aborted")


def last_steps(folder: Path, run_id: str) -> dict[str, int]:
    """The last step of each metric in SwanLab's files of one experiment, without what a kill has cut off."""
    steps: dict[str, int] = {}
    for path in sorted(folder.glob(f"run-*-{run_id}/*.swanlab")):
        for name, step in scalars(path):
            steps[name] = max(step, steps.get(name, NO_STEP))
    return steps


def scalars(path: Path) -> Iterator[tuple[str, int]]:
    """Name and step of each value in one file of SwanLab."""
    # SwanLab has no public reader; the extra allows only versions that this was tried with.
    reader = importlib.import_module("swanlab.sdk.internal.core_python.store").DataStoreReader()
    record_class: Any = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2").Record
    # SwanLab writes in blocks: the file of a run that was killed early is empty.
    if path.stat().st_size == 0:
        return
    reader.open(path)
    try:
        for content in reader:
            record = record_class.FromString(content)
            if record.HasField("scalar"):
                yield record.scalar.key, record.scalar.step
    finally:
        reader.close()
