"""Read from a run directory what the page shows: state, curves and tables of evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spurline.run.directory import CONFIG_FILE, check_run_directory, read_mapping
from spurline.trackers.jsonl import METRICS_FILE, read_metrics
from spurline_insight.report.figure import moving_means, thinned
from spurline_insight.report.record import distinct_names, evaluation_metrics, read_summary, setting
from spurline_insight.report_panel import RunRecord

MAX_POINTS = 2000
"""Largest number of points in a curve of the page."""


class ViewedRun:
    """A finished or running run. Methods return the present content of the run's files. Several threads may call them.

    Raises:
        RunDirectoryError: If the folder is missing or is not a run directory.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        check_run_directory(run_dir)
        self.run_dir = run_dir
        self.name = name
        self._read: tuple[Any, Sequence[Mapping[str, float]]] = (None, [])

    def state(self) -> dict[str, Any]:
        """Return status, steps, error, names of metrics, and `source.max_staleness` if it is set."""
        lines, summary = self._metrics(), read_summary(self.run_dir)
        return {
            "status": str(summary.get("status", "unknown")),
            "error": summary.get("error"),
            "step": lines[-1].get("step", 0) if lines else 0,
            "total_steps": summary.get("total_steps"),
            "metrics": sorted({name for line in lines for name in line} - {"step"}),
            "max_age": setting(read_mapping(self.run_dir / CONFIG_FILE), "source", "max_staleness"),
        }

    def series(self, metric: str) -> dict[str, Any]:
        """Return steps, values and moving means of a metric, with at most `MAX_POINTS` points."""
        steps, values = thinned(*self._record().series(metric), MAX_POINTS)
        return {"steps": steps, "values": values, "means": moving_means(values)}

    def evaluations(self) -> dict[str, Any]:
        """Return `tables`, one for each evaluation: its metrics, and a row of values for each evaluated step."""
        record = self._record()
        columns: dict[str, dict[str, str]] = {}
        for name, metric in evaluation_metrics(record):
            columns.setdefault(name.removesuffix(metric), {})[name] = metric
        tables = [
            {
                "set": prefix.removeprefix("eval/").removesuffix("/"),
                "metrics": list(names.values()),
                "rows": [
                    {"step": line["step"], "values": [line.get(name) for name in names]}
                    for line in record.metrics
                    if any(name in line for name in names)
                ],
            }
            for prefix, names in sorted(columns.items())
        ]
        return {"tables": tables}

    def shares(self) -> dict[str, Any]:
        """Return `steps`: for each step that `spurline blame` has explained, the groups with their shares and texts."""
        paths = sorted(self.run_dir.glob("blame/step-*.json"))
        return {"steps": [read_mapping(path) for path in paths]}

    def _metrics(self) -> Sequence[Mapping[str, float]]:
        """Return the complete lines of metrics.jsonl. Read the file only if it has changed."""
        path = self.run_dir / METRICS_FILE
        try:
            stat = path.stat()
        except FileNotFoundError:
            return []
        version, read = (stat.st_ino, stat.st_size, stat.st_mtime_ns), self._read
        if read[0] != version:
            self._read = read = (version, read_metrics(path))
        return read[1]

    def _record(self) -> RunRecord:
        return RunRecord(self.run_dir, self._metrics(), read_mapping(self.run_dir / CONFIG_FILE))


def open_runs(run_dirs: Sequence[Path]) -> list[ViewedRun]:
    """Return the runs of these folders, with different names."""
    return [ViewedRun(run_dir, name) for run_dir, name in zip(run_dirs, distinct_names(run_dirs), strict=True)]
