"""A run directory as the page shows it: its state, curves and tables of evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from spurline.errors import RunDirectoryError
from spurline.files import regular_file
from spurline.run.directory import RunDirectory
from spurline.run.record_files import CONFIG_FILE, SUMMARY_FILE, read_mapping
from spurline.trackers.jsonl import METRICS_FILE
from spurline_insight.report.figure import thinned
from spurline_insight.report.record import check_run_directory, distinct_names, evaluations_of, setting
from spurline_insight.report_panel import RunRecord

MAX_POINTS = 2000
"""Points of a curve that a page is sent."""


class ViewedRun:
    """A finished or running run. Each answer is of what its files hold by then. Safe to use from several threads.

    Raises RunDirectoryError when the folder is missing or is no run directory.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        check_run_directory(run_dir)
        self.run_dir = run_dir
        self.name = name
        self._metrics = _MetricLines(run_dir / METRICS_FILE)

    def state(self) -> dict[str, Any]:
        """What the page says about the run: status, steps, error, the names of its metrics, the limit of ages.

        max_age: updates that a token may be old, where the run has such a bound.
        """
        lines = self._metrics.read()
        summary = read_mapping(self.run_dir / SUMMARY_FILE)
        status = str(summary.get("status", "unknown"))
        if status == "running" and not RunDirectory(self.run_dir).is_in_use():
            # Its process died without a word: killed, or the machine went down.
            status = "interrupted"
        return {
            "status": status,
            "error": summary.get("error"),
            "step": lines[-1].get("step", 0) if lines else 0,
            "total_steps": summary.get("total_steps"),
            "metrics": sorted({name for line in lines for name in line} - {"step"}),
            "max_age": setting(read_mapping(self.run_dir / CONFIG_FILE), "source", "max_staleness"),
        }

    def series(self, metric: str) -> dict[str, Any]:
        """Steps and values of a metric, thinned to what a plot can show."""
        steps, values = self._record().series(metric)
        kept_steps, kept_values = thinned(steps, values, MAX_POINTS)
        return {"steps": kept_steps, "values": kept_values}

    def evaluations(self) -> dict[str, Any]:
        """`tables`, one for each evaluation set: its metrics, and a row of values for each step that measured one."""
        record = self._record()
        columns: dict[str, dict[str, str]] = {}
        prefixes = sorted(evaluations_of(record), key=len, reverse=True)
        for name in sorted({name for line in record.metrics for name in line if name.startswith("eval/")}):
            prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
            columns.setdefault(prefix, {})[name] = name.removeprefix(prefix)
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

    def _record(self) -> RunRecord:
        return RunRecord(self.run_dir, self._metrics.read(), read_mapping(self.run_dir / CONFIG_FILE))


class _MetricLines:
    """The lines of `metrics.jsonl`, of which each is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._lines: list[Mapping[str, float]] = []
        self._inode = 0
        self._end = 0

    def read(self) -> Sequence[Mapping[str, float]]:
        """All complete lines. Raises RunDirectoryError naming the place of one that is unreadable."""
        with self._lock:
            try:
                with open(self._path, "rb", opener=regular_file) as file:
                    stat = self._path.stat()
                    # A run that is resumed puts a shorter file in its place.
                    if stat.st_ino != self._inode or stat.st_size < self._end:
                        self._lines, self._inode, self._end = [], stat.st_ino, 0
                    file.seek(self._end)
                    added = file.read()
            except FileNotFoundError:
                self._lines, self._inode, self._end = [], 0, 0
                return []
            except OSError as error:
                raise RunDirectoryError(f"{self._path}: cannot be read: {error.strerror or error}.") from error
            complete = added[: added.rfind(b"\n") + 1]
            self._lines = [*self._lines, *self._parsed(complete)]
            self._end += len(complete)
            return self._lines

    def _parsed(self, content: bytes) -> Iterator[Mapping[str, float]]:
        for line in content.splitlines():
            if not line.strip():
                continue
            try:
                parsed = json.loads(line)
                if not isinstance(parsed, dict) or not isinstance(parsed.get("step"), int):
                    raise ValueError("not a JSON object with a whole number under 'step'")
            except ValueError as error:
                raise RunDirectoryError(
                    f"{self._path}: after byte {self._end:,} a line is unreadable ({error}). This file was changed by "
                    "something else. Repair or remove that line."
                ) from error
            yield parsed


def open_runs(run_dirs: Sequence[Path]) -> list[ViewedRun]:
    """The runs of these folders, each with a name of its own."""
    return [ViewedRun(run_dir, name) for run_dir, name in zip(run_dirs, distinct_names(run_dirs), strict=True)]
