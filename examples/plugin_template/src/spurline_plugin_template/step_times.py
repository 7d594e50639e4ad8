"""Measure the time of each step, warn about slow steps, and write percentiles at the end of the run.

In: the loop's hooks. Out: the metric `time/update`, log warnings, RUN_DIR/step_times.json.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from spurline.plugins import hookimpl
from spurline_plugin_template.config import TemplateConfig
from spurline_plugin_template.percentiles import percentile
from spurline_plugin_template.typical_time import TypicalTime

FILE_NAME = "step_times.json"

logger = logging.getLogger(__name__)


class StepTimes:
    """The hook implementations for one run. Steps before a resume are not counted: they may be from another machine."""

    def __init__(self, settings: TemplateConfig, run_dir: Path, typical: TypicalTime, hooks: Any) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._typical = typical
        self._hooks = hooks
        self._skipped = 0
        self._seconds: list[float] = []
        self._slow: dict[int, float] = {}

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Mapping[str, float], Mapping[str, float]]:
        """Measure the update of core, which runs at `yield`. A hookimpl takes only the arguments that it needs."""
        begin = time.perf_counter()
        metrics = yield
        return {**metrics, "time/update": time.perf_counter() - begin}

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._skipped < self._settings.warm_up_steps:
            self._skipped += 1
            return
        # Only some steps have an evaluation. With its time, these steps would seem slow.
        seconds = metrics["time/step"] - metrics.get("time/evaluate", 0.0)
        if self._seconds:
            usual = self._typical.seconds(self._seconds)
            if seconds > self._settings.warn_factor * usual:
                self._slow[step] = seconds
                logger.warning("step %d took %.3g s, %.1f times the typical time", step, seconds, seconds / usual)
                self._hooks.on_slow_step(step=step, seconds=seconds)
        self._seconds.append(seconds)

    @hookimpl
    def on_run_end(self) -> None:
        (self._run_dir / FILE_NAME).write_text(json.dumps(self.summary(), indent=2) + "\n", encoding="utf-8")

    def summary(self) -> dict[str, object]:
        """Return the number of measured steps, seconds per percentile, and the slow steps with their seconds."""
        shares = self._settings.percentiles if self._seconds else ()
        return {
            "steps": len(self._seconds),
            "percentiles_s": {f"{share:g}": percentile(self._seconds, share) for share in shares},
            "slow_steps_s": {str(step): seconds for step, seconds in self._slow.items()},
        }
