"""Compare several runs on one page: their results, the settings that differ, and their curves in common plots.

A run has the same colour in the header and in all plots. Metrics that at least two runs recorded get a plot. Plots of
the usual metrics are open. Other plots are folded, in groups by the first part of the metric's name. If the runs are a
parent and its forks, the page begins with the settings that differ, and shows the steps after the first fork.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from spurline.errors import UserError, listing
from spurline_insight.report.document import write_page
from spurline_insight.report.figure import Trace, line, one_of_several, series_color, step_figure
from spurline_insight.report.markup import block, caption, scalar, score, status_mark, table, text
from spurline_insight.report.page import facts_of, steps_of
from spurline_insight.report.record import distinct_names, read_record
from spurline_insight.report_panel import RunRecord

COMPARISON_FILE = "comparison.html"
"""The default file of the page, in the working directory."""
MOST_RUNS = 20
"""Largest number of runs. More curves in one plot cannot be told apart."""

_HEADLINES = ("loss", "reward/mean", "grad_norm", "response/length", "mismatch/kl", "time/step")
_FOLDED_POINTS = 100
_LONGEST_SETTING = 100
_NOTHING = "\u2013"


@dataclass(frozen=True)
class ComparedRun:
    """A run with its name and line style on the page."""

    name: str
    record: RunRecord
    color: str
    """Name of a CSS variable."""
    dash: str

    @cached_property
    def metrics(self) -> frozenset[str]:
        return frozenset(name for line in self.record.metrics for name in line) - {"step"}


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Compare the runs of these folders on the page `out`, and return its path.

    Raises:
        RunDirectoryError: If a folder holds no run.
        UserError: If a folder is given twice, if there are too many folders, or if no two runs have a common metric.
    """
    places = [run_dir.resolve() for run_dir in run_dirs]
    twice = [str(run_dir) for run_dir, place in zip(run_dirs, places, strict=True) if places.count(place) > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice. Give each run once.")
    if len(run_dirs) > MOST_RUNS:
        raise UserError(f"{len(run_dirs)} runs are too many for one page. Give at most {MOST_RUNS}.")
    runs = [
        ComparedRun(name, read_record(run_dir), series_color(number), "solid" if number < 8 else "dot")
        for number, (run_dir, name) in enumerate(zip(run_dirs, distinct_names(run_dirs), strict=True))
    ]
    fork = _first_fork(runs)
    if fork is not None:
        runs = [replace(run, record=_after(run.record, fork)) for run in runs]
    recorded = Counter(name for run in runs for name in run.metrics)
    shared = sorted(name for name, count in recorded.items() if count > 1)
    if not shared:
        found = "; ".join(f"{run.name}: {listing(sorted(run.metrics)[:8]) or 'nothing yet'}" for run in runs)
        raise UserError(f"These runs have recorded no metric in common, so they cannot be compared ({found}).")
    title = f"{', '.join(run.name for run in runs)} · Spurline comparison"
    folders = ", ".join(f"<code>{text(run.record.run_dir.resolve())}</code>" for run in runs)
    parts = [("Results", _results(runs)), ("Settings that differ", _settings(runs, fork))]
    sections = [*(parts if fork is None else reversed(parts)), *_curves(runs, shared)]
    write_page(out, title, _header(runs), sections, f"Spurline comparison of {folders}")
    return out


def _first_fork(runs: Sequence[ComparedRun]) -> int | None:
    """Return the step at which the first fork of one parent began, or None if the runs are no such family."""
    families: set[str] = set()
    steps: list[int] = []
    for run in runs:
        history = run.record.summary.get("history", [])
        forks = [change for change in history if change["key"] == "run_dir"]
        families.add(forks[-1]["before"] if forks else str(run.record.run_dir.resolve()))
        steps += [change["step"] for change in forks[-1:]]
    return min(steps) if len(families) == 1 and steps else None


def _after(record: RunRecord, step: int) -> RunRecord:
    return replace(record, metrics=[line for line in record.metrics if line["step"] > step])


def _header(runs: Sequence[ComparedRun]) -> str:
    entries: list[str] = []
    for run in runs:
        finished, total = steps_of(run.record)
        steps = f"{finished:,} of {total:,} steps" if total is not None else f"{finished:,} steps"
        facts = " · ".join([steps, *facts_of(run.record.config, run.record.summary)])
        status = status_mark(str(run.record.summary.get("status", "unknown")))
        name = f'<span class="swatch" style="background:var({run.color})"></span>{text(run.name)}'
        entries.append(f'<li><strong>{name}</strong> {status} <span class="facts">{text(facts)}</span></li>')
    return f'<header><h1>{len(runs)} runs compared</h1><ul class="runs">{"".join(entries)}</ul></header>'


def _results(runs: Sequence[ComparedRun]) -> str:
    names = _usual({name for run in runs for name in run.metrics})
    rows = [[text(name), *(_result(run, name) for run in runs)] for name in names]
    note = "The last value of each metric, then the lowest and the highest with their steps."
    return block(caption(note), table(["Metric", *(run.name for run in runs)], rows), wide=True)


def _usual(names: Iterable[str]) -> list[str]:
    """Return the given names that are in `_HEADLINES` or belong to evaluation metrics, except evaluation times."""
    given = set(names)
    evaluations = sorted(name for name in given if name.startswith("eval/") and not name.endswith("/time"))
    return [name for name in _HEADLINES if name in given] + evaluations


def _result(run: ComparedRun, name: str) -> str:
    steps, values = run.record.series(name)
    if not values:
        return _NOTHING
    ends = " · ".join(f"{score(end)} at step {steps[values.index(end)]:,}" for end in (min(values), max(values)))
    return f"{score(values[-1])} <small>{ends}</small>"


def _settings(runs: Sequence[ComparedRun], fork: int | None) -> str:
    flat = [_flat(run.record.config) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows: list[list[str]] = []
    for key in keys:
        values = [settings.get(key, _NOTHING) for settings in flat]
        # `run_dir` always differs, and the names of the runs already show this.
        if key != "run_dir" and len(set(values)) > 1:
            shown = (f"{value[:_LONGEST_SETTING]}…" if len(value) > _LONGEST_SETTING else value for value in values)
            rows.append([f"<code>{text(value)}</code>" for value in (key, *shown)])
    if not rows:
        return block(caption("None: the runs have the same config."), wide=True)
    note = "" if fork is None else caption(f"These runs are one run up to step {fork:,}. Later steps are shown.")
    return block(note, table(["Setting", *(run.name for run in runs)], rows, css="settings-table"), wide=True)


def _flat(value: Any, key: str = "") -> dict[str, str]:
    """Map the path of each setting to its value in YAML. A list with nested values adds the item's index to paths."""
    if isinstance(value, Mapping) and value:
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {key: scalar(value)}
    return {path: leaf for name, item in items for path, leaf in _flat(item, f"{key}.{name}" if key else name).items()}


def _curves(runs: Sequence[ComparedRun], shared: Sequence[str]) -> list[tuple[str, str]]:
    usual = _usual(shared)
    sections = [(name, block(_plot(runs, name))) for name in usual]
    groups: dict[str, list[str]] = {}
    for name in shared:
        if name not in usual:
            groups.setdefault(name.partition("/")[0] if "/" in name else "other", []).append(name)
    for group, names in sorted(groups.items()):
        plots = "".join(f"<div><h3>{text(name)}</h3>{_plot(runs, name, is_folded=True)}</div>" for name in names)
        folded = f'<details><summary>{len(names)} more</summary><div class="columns even">{plots}</div></details>'
        sections.append((group, block(folded, wide=True)))
    return sections


def _plot(runs: Sequence[ComparedRun], name: str, *, is_folded: bool = False) -> str:
    traces: list[Trace] = []
    for run in runs:
        steps, values = run.record.series(name)
        if steps:
            curve = run.name, steps, values, run.color
            drawn = [line(*curve, most=_FOLDED_POINTS)] if is_folded else one_of_several(*curve)
            traces += [trace | {"line": {**trace["line"], "dash": run.dash}} for trace in drawn]
    return step_figure(traces, name, label=f"{name} over steps of {len(runs)} runs")
