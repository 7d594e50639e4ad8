"""Write TensorBoard event files in RUN_DIR/tensorboard, one scalar per metric under its own name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import indent
from typing import Any

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import TensorboardTrackerConfig
from spurline_trackers.sending import tracker_library

_FLUSH_EVERY_S = 10


class TensorboardTracker:
    """A tracker that writes metrics as scalars, and the settings of the run as text."""

    def __init__(self, config: TensorboardTrackerConfig) -> None:
        self._config = config
        self._writer_class = tracker_library("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def start(self, info: RunInfo) -> None:
        """Open a new event file. In older files, TensorBoard then hides step `info.first_step` and all later steps."""
        self._writer = self._writer_class(
            log_dir=str(info.run_dir / "tensorboard"), purge_step=info.first_step, flush_secs=_FLUSH_EVERY_S
        )
        # TensorBoard reads the text as Markdown, in which an indented block is code.
        block = indent(json.dumps(info.config, indent=2, default=str), "    ")
        self._writer.add_text("config", block, global_step=info.resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, global_step=step)

    def flush(self) -> None:
        """Write all values to disk, since a resume does not log the steps before its checkpoint again."""
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
