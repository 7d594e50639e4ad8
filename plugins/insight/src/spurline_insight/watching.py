"""Watch a run while it trains: say at once what is off at a step, and at the end what was off in the whole run.

The hooks of the plugin attach a `Watcher` to each run. It remembers the steps before a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spurline.plugins import hookimpl
from spurline.plugins.run_view import RunView, Warned
from spurline.trackers.jsonl import read_metrics
from spurline_insight.health import HealthWatch, findings, trained_steps


class Watcher:
    """Judges the steps of one run in order."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._config = run.loaded.resolved()
        self._health = HealthWatch(self._config)
        if run.state.checkpoint is not None:
            # What comes is compared with what was, also before a resume.
            for metrics in read_metrics(run.directory.metrics, skip_foreign=True):
                if metrics["step"] <= run.state.step:
                    self._health.judge(int(metrics["step"]), metrics)

    @classmethod
    def attach(cls, run: RunView) -> None:
        """Let one judge the steps of this run until it ends."""
        watcher = cls(run)
        run.loaded.host.attach(watcher, "insight/health")
        run.add_judge(watcher.warnings)

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        for kind, words in self._health.judge(step, metrics).items():
            self._run.warn(step, kind, words)

    def warnings(self) -> Sequence[Warned]:
        """Return what was off in the run as a whole, with the steps at which it was."""
        lines = read_metrics(self._run.directory.metrics, skip_foreign=True)
        steps = trained_steps(lines)
        found = findings(lines, self._config)
        return [Warned(each.kind, f"{each.words} {each.when(steps)}.", each.lasts) for each in found]
