"""Several runs on one page: what they were set to, what they came to, and their curves over each other.

RunRecords with names go in, one HTML file of less than 2 MB comes out, however many runs, metrics and steps there are:
points, metrics and rows are left out until it is, and the page says how many. Of each run only what a page can show
stays in memory. A run has the same colour everywhere. Curves are of metrics that at least two runs recorded; the common
ones stand open, the others are folded by the first part of their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spurline.errors import RunDirectoryError, UserError, listing
from spurline.files import replace_file
from spurline.run.directory import RunDirectory
from spurline.trackers.readout import score
from spurline_insight.report.document import document
from spurline_insight.report.figure import SMOOTHED_FROM, Trace, line, moving_means, series_color, step_figure, thinned
from spurline_insight.report.markup import block, caption, footer, scalar, status_mark, table, text
from spurline_insight.report.page import facts_of, record_of, steps_of
from spurline_insight.report.record import distinct_names, evaluation_losses, evaluation_scores, evaluations_of
from spurline_insight.report_panel import RunRecord

COMPARISON_FILE = "comparison.html"
"""Where a comparison goes by default, in the working directory."""

_HEADLINES = ("loss", "reward/mean", "grad_norm", "response/length", "mismatch/kl", "time/step")
_MOST_BYTES = 1_990_000
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.12, 0.06, 0.03, 0.015, 0.008)
"""Of what the page shows at most, tried in turn until it is small enough."""
_OPEN_POINTS, _FOLDED_POINTS = 8_000, 6_000
"""Points of all curves that stand open, and of all that are folded."""
_MOST_POINTS, _FEWEST_POINTS = 300, 12
"""Points of one curve, whatever the number of curves."""
_OPEN_CURVES, _FOLDED_CURVES = 2_000, 4_000
"""Curves of all plots that stand open, and of all that are folded."""
_MOST_FOLDED = 400
"""Metrics whose curves are folded."""
_MOST_ROWS = 10
"""Steps of a table of evaluation scores; of more, these are chosen evenly, the first and the last included."""
_NAMED = 8
"""Runs that are named in one line."""
_MOST_IN_LEGEND = 16
_MOST_SETTINGS = 150
_MOST_RESULTS = 60
_MOST_SCORES = 60
"""Tables of evaluation scores, of all sets."""
_NOTHING = "\u2013"
_SHOWN_SETTING = 100
"""Characters of a setting, and of the name of a run."""

_Series = tuple[list[int], list[float]]
"""Steps and values."""


@dataclass(frozen=True)
class ComparedRun:
    """A run with its name and colour on the page. color: the name of a CSS variable.

    record: without its metrics. facts: how far it came, and of what it is. curves: of each metric the points that a
    page can show, with the first and last one and all extremes; of evaluations all. means: of metrics that stand open,
    their moving means. counts: points before. losses, shares: names of its held-out losses, and of its evaluation
    scores of which more is better.
    """

    name: str
    record: RunRecord
    color: str
    dash: str
    facts: Sequence[str]
    curves: Mapping[str, _Series]
    means: Mapping[str, _Series]
    counts: Mapping[str, int]
    losses: frozenset[str]
    shares: frozenset[str]

    @property
    def mark(self) -> str:
        """Its name with its colour, as HTML."""
        return f'<span class="swatch" style="background:var({self.color})"></span>{text(self.name)}'

    @property
    def metrics(self) -> list[str]:
        """Sorted names of all it recorded."""
        return sorted(self.curves)

    def series(self, name: str) -> _Series:
        """Steps and values of one metric."""
        return self.curves.get(name, ([], []))


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Compare the runs of these folders in `out`; returns its path.

    Raises RunDirectoryError for a folder that is no run, UserError for one given twice, for runs that recorded no
    metric in common, and for more runs than a page can name.
    """
    runs = _read(run_dirs)
    shared = _shared_metrics(runs)
    if not shared:
        recorded = "; ".join(f"{run.name}: {listing(run.metrics[:8]) or 'nothing yet'}" for run in runs)
        raise UserError(f"These runs have recorded no metric in common, so there is nothing to compare ({recorded}).")
    for share in _SHARES:
        page = _page(runs, shared, share)
        # Packed, a page can be read with scripts alone.
        for packs_body in (False, True) if share == 1 else (True,):
            content = document(_title(runs), page, packs_body=packs_body).encode(errors="replace")
            if len(content) <= _MOST_BYTES:
                replace_file(out, content.decode())
                return out
    raise UserError(f"{len(runs):,} runs do not fit on a page of 2 MB. Give fewer.")


def _page(runs: Sequence[ComparedRun], shared: Sequence[str], share: float) -> str:
    """What stands on the page. share: of the most that each section may show."""
    curves, notes = _curves(runs, shared, share)
    sections = [
        _section("Results", _results(runs, _part(_MOST_RESULTS, share))),
        _section("Settings that differ", _settings(runs, _part(_MOST_SETTINGS, share))),
        *curves,
        *(
            _section(f"Evaluation: {name}", content)
            for name, content in _evaluations(runs, _part(_MOST_SCORES, share), max(2, _part(_MOST_ROWS, share)))
        ),
    ]
    folders = ", ".join(f"<code>{text(run.record.run_dir.resolve())}</code>" for run in runs)
    return f"""{_header(runs, notes)}
<div class="grid">
{"".join(sections)}
</div>
{footer(f"Spurline comparison of {folders}")}"""


def _title(runs: Sequence[ComparedRun]) -> str:
    return f"{_names(runs)} · Spurline comparison"


def _names(runs: Sequence[ComparedRun]) -> str:
    """Of the first of them, for places that hold one line."""
    rest = f" and {len(runs) - _NAMED:,} more" if len(runs) > _NAMED else ""
    return ", ".join(run.name for run in runs[:_NAMED]) + rest


def _part(most: int, share: float) -> int:
    return max(1, round(most * share))


def _read(run_dirs: Sequence[Path]) -> list[ComparedRun]:
    places = [run_dir.resolve() for run_dir in run_dirs]
    twice = next((run_dir for run_dir, place in zip(run_dirs, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice. Give each run once.")
    for run_dir in run_dirs:
        if not run_dir.is_dir():
            raise RunDirectoryError(f"{run_dir}: no such folder. Give the run_dir of a run, such as runs/default.")
    return [
        _compared(number, _cut(name), record_of(RunDirectory(run_dir)))
        for number, (run_dir, name) in enumerate(zip(run_dirs, distinct_names(run_dirs), strict=True))
    ]


def _compared(number: int, name: str, record: RunRecord) -> ComparedRun:
    """The run without what no page can show."""
    names = {metric for line in record.metrics for metric in line} - {"step"}
    whole = {metric: record.series(metric) for metric in names}
    smoothed = [metric for metric in names.intersection(_HEADLINES) if len(whole[metric][0]) >= SMOOTHED_FROM]
    return ComparedRun(
        name,
        replace(record, metrics=()),
        series_color(number),
        "solid" if number < 8 else "dot",
        _facts(record),
        {
            metric: series if metric.startswith("eval/") else thinned(*series, _MOST_POINTS)
            for metric, series in whole.items()
        },
        {metric: thinned(whole[metric][0], moving_means(whole[metric][1]), _MOST_POINTS) for metric in smoothed},
        {metric: len(steps) for metric, (steps, _) in whole.items()},
        frozenset(evaluation_losses(record)),
        frozenset(evaluation_scores(record)[0]),
    )


def _shared_metrics(runs: Sequence[ComparedRun]) -> list[str]:
    """Names of metrics that two runs or more recorded."""
    recorded = Counter(name for run in runs for name in run.metrics)
    return sorted(name for name, count in recorded.items() if count > 1)


def _header(runs: Sequence[ComparedRun], notes: Sequence[str]) -> str:
    entries = "".join(
        f"<li><strong>{run.mark}</strong> {status_mark(str(run.record.summary.get('status', 'unknown')))} "
        f'<span class="facts">{text(" · ".join(run.facts))}</span></li>'
        for run in runs
    )
    said = "".join(map(caption, notes))
    return f'<header><h1>{len(runs)} runs compared</h1>{said}<ul class="runs">{entries}</ul></header>'


def _facts(record: RunRecord) -> list[str]:
    finished, total = steps_of(record)
    steps = f"{finished:,} of {total:,} steps" if total is not None else f"{finished:,} steps"
    return [steps, *facts_of(record.config, record.summary)]


def _section(title: str, content: str) -> str:
    return f'<section class="panel"><h2>{text(title)}</h2>{content}</section>'


# Results


def _direction(runs: Sequence[ComparedRun], name: str) -> Callable[..., Any] | None:
    """`min` or `max`, whichever of its values is the best; None where neither is known to be."""
    if name == "loss":
        # The loss of a policy says nothing of how good it is.
        return None if any("reward/mean" in run.metrics for run in runs) else min
    if name == "reward/mean" or name.rpartition("/")[2] in ("reward", "pass@1"):
        return max
    if any(name in run.losses for run in runs) or name.endswith("perplexity"):
        return min
    return max if all(name in run.shares for run in runs if name in run.metrics) else None


_OF_TEXTS = ("data.max_length", "data.too_long", "data.train_on", "model.tokenizer", "model.chat_template")
"""Settings by which the same rows become other held-out tokens."""
_OF_ANSWERS = ("evaluation.generate", "source.held_out")
_OF_RHYTHM = ("every_steps", "at_start", "batch_size")
"""Settings of an evaluation that change no value."""


def _measured_otherwise(runs: Sequence[ComparedRun], name: str) -> list[str]:
    """Settings that differ between the runs which recorded this evaluation metric, and change what it measures."""
    recorded = [run for run in runs if name in run.metrics]
    prefix = max(
        (prefix for run in recorded for prefix in evaluations_of(run.record) if name.startswith(prefix)), key=len
    )
    keys = [*_OF_TEXTS, "data.eval", *(() if any(name in run.losses for run in recorded) else _OF_ANSWERS)]
    if prefix != "eval/":
        keys = [*_OF_TEXTS, f"evaluations.{prefix.removeprefix('eval/').rstrip('/')}"]
    flat = [
        {
            key: value
            for key, value in _flat(run.record.config).items()
            if any(f"{key}.".startswith(f"{wanted}.") for wanted in keys) and key.rpartition(".")[2] not in _OF_RHYTHM
        }
        for run in recorded
    ]
    found = dict.fromkeys(key for settings in flat for key in settings)
    return [key for key in found if len({settings.get(key, _NOTHING) for settings in flat}) > 1]


def _results(runs: Sequence[ComparedRun], most: int) -> str:
    recorded = {name for run in runs for name in run.metrics}
    names = [name for name in _HEADLINES if name in recorded]
    names += sorted(name for name in recorded if name.startswith("eval/") and not name.endswith("/time"))
    rows: list[list[str]] = []
    unlike: dict[str, list[str]] = {}
    for name in names[:most]:
        direction = _direction(runs, name)
        series = [run.series(name) for run in runs]
        otherwise = ", ".join(_measured_otherwise(runs, name)) if name.startswith("eval/") else ""
        if otherwise:
            unlike.setdefault(otherwise, []).append(name)
        bests = [direction(values) for _, values in series if values] if direction and not otherwise else []
        rows.append([text(name), *(_result(steps, values, direction, bests) for steps, values in series)])
    return block(
        caption("The last value of each metric, and the best one with its step; the best of all runs is bold."),
        *(
            caption(f"No best of all runs for {listing(names)}: they were measured otherwise, as {keys} differs.")
            for keys, names in unlike.items()
        ),
        _run_table(["Metric"], runs, rows),
        *_left_out(len(names) - len(rows), "metrics"),
        wide=True,
    )


def _left_out(number: int, what: str) -> list[str]:
    """A line that says so, where something was left out."""
    return [caption(f"{number:,} more {what}: spurline view and metrics.jsonl have them.")] if number else []


def _result(
    steps: Sequence[int], values: Sequence[float], direction: Callable[..., Any] | None, bests: Sequence[float]
) -> str:
    if not values:
        return _NOTHING
    if direction is None:
        return score(values[-1])
    best = direction(range(len(values)), key=values.__getitem__)
    shown = f"best {score(values[best])} at step {steps[best]:,}"
    is_best = len(bests) > 1 and values[best] == direction(bests)
    return f"{score(values[-1])} <small>{f'<strong>{shown}</strong>' if is_best else shown}</small>"


def _run_table(
    headings: Sequence[str], runs: Sequence[ComparedRun], rows: Sequence[Sequence[str]], css: str = ""
) -> str:
    """A table with a column for each run, headed by its name in its colour."""
    head = "".join(f'<th scope="col">{text(heading)}</th>' for heading in headings)
    head += "".join(f'<th scope="col">{run.mark}</th>' for run in runs)
    return table([], rows, css=css).replace("<thead><tr></tr>", f"<thead><tr>{head}</tr>", 1)


# Settings


def _settings(runs: Sequence[ComparedRun], most: int) -> str:
    flat = [_flat(run.record.config) for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    # The folder is what the runs are called by.
    differing = [
        key for key in keys if key != "run_dir" and len({settings.get(key, _NOTHING) for settings in flat}) > 1
    ]
    if not differing:
        return block(caption("None: the runs have the same config."), wide=True)
    rows = [
        [f"<code>{text(key)}</code>", *(f"<code>{text(_cut(settings.get(key, _NOTHING)))}</code>" for settings in flat)]
        for key in differing[:most]
    ]
    left_out = len(differing) - len(rows)
    note = [caption(f"{left_out:,} others differ too; config.json of each run has them.")] if left_out else []
    return block(_run_table(["Setting"], runs, rows, css="settings-table"), *note, wide=True)


def _flat(value: Any, key: str = "") -> dict[str, str]:
    """Key path -> value as YAML has it, of every leaf; parts of lists by their number."""
    if isinstance(value, Mapping) and value:
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {key: scalar(value)}
    return {path: leaf for name, item in items for path, leaf in _flat(item, f"{key}.{name}" if key else name).items()}


def _cut(value: str) -> str:
    return value if len(value) <= _SHOWN_SETTING else f"{value[: _SHOWN_SETTING - 1]}…"


# Curves


def _curves(runs: Sequence[ComparedRun], shared: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Sections with plots, and sentences about what they leave out."""
    headlines = [name for name in _HEADLINES if name in shared]
    headlines += [name for name in shared if name.startswith("eval/") and not name.endswith("/time")][:12]
    headlines = headlines[: max(1, _part(_OPEN_CURVES, share) // len(runs))]
    every = [name for name in shared if name not in headlines]
    rest = every[: min(_part(_MOST_FOLDED, share), _part(_FOLDED_CURVES, share) // len(runs))]
    # Those that stand open are drawn twice: the values, and their moving mean.
    of_open = _points(share, _OPEN_POINTS, 2 * len(runs) * len(headlines))
    sections = [_section(name, block(_curve(runs, name, of_open))) for name in headlines]
    groups: dict[str, list[str]] = {}
    for name in rest:
        groups.setdefault(name.partition("/")[0] if "/" in name else "other", []).append(name)
    of_folded = _points(share, _FOLDED_POINTS, len(runs) * len(rest))
    for group, names in sorted(groups.items()):
        plots = "".join(f"<div><h3>{text(name)}</h3>{_curve(runs, name, of_folded)}</div>" for name in names)
        folded = f'<details><summary>{len(names)} more</summary><div class="columns even">{plots}</div></details>'
        sections.append(_section(group, block(folded, wide=True)))
    if left_out := _left_out(len(every) - len(rest), "metrics"):
        sections.append(_section("not drawn", block(*left_out, wide=True)))
    drawn = (("Curves that stand open", headlines, of_open), ("Folded curves", rest, of_folded))
    return sections, [
        f"{which} have at most {most:,} of {longest:,} points: the lowest and the highest of each stretch."
        for which, names, most in drawn
        if (longest := max((run.counts.get(name, 0) for run in runs for name in names), default=0)) > most
    ]


def _points(share: float, budget: int, num_curves: int) -> int:
    """Of each curve."""
    fewest = max(4, _part(_FEWEST_POINTS, share))
    return max(fewest, min(_MOST_POINTS, _part(budget, share) // max(1, num_curves)))


def _curve(runs: Sequence[ComparedRun], name: str, most: int) -> str:
    """Where there are moving means, they are drawn over the values, which are faint then."""
    traces: list[Trace] = []
    for run in runs:
        values, means = run.series(name), run.means.get(name)
        if means is not None:
            common: Trace = {"legendgroup": run.name, "mode": "lines"}
            faint = _line(run, values, most, width=1, opacity=0.35, showlegend=False, **common)
            # Pointing at the plot shows the values themselves.
            traces += [faint, _line(run, means, most, hoverinfo="skip", hovertemplate=None, **common)]
        elif values[0]:
            traces.append(_line(run, values, most))
    # The list of runs has their colours; legends of more, and boxes with the values of all, would cover the plot.
    layout = {"showlegend": False, "hovermode": "closest"} if len(runs) > _MOST_IN_LEGEND else {}
    return step_figure(traces, name, layout, label=f"{name} over steps of {_names(runs)}")


def _line(run: ComparedRun, series: _Series, most: int, **changes: Any) -> Trace:
    # Four digits are more than a plot shows.
    steps, values = thinned(*series, most)
    trace = line(run.name, steps, [float(f"{value:.4g}") for value in values], run.color, **changes)
    return trace | {"line": {**trace["line"], "dash": run.dash}}


# Evaluations


def _evaluations(runs: Sequence[ComparedRun], most: int, most_rows: int) -> list[tuple[str, str]]:
    """Name and content of each evaluation set: for each of its metrics a row for a step and a column for a run."""
    prefixes = sorted(
        {prefix for run in runs for prefix in evaluations_of(run.record)}, key=lambda name: (-len(name), name)
    )
    sets: dict[str, list[str]] = {}
    for name in sorted({name for run in runs for name in run.metrics if name.startswith("eval/")}):
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        if name != f"{prefix}time":
            sets.setdefault(prefix, []).append(name)
    shown = sorted(sets.items())[:most]
    each = max(1, most // max(1, len(shown)))
    found = [
        (prefix.removeprefix("eval/").rstrip("/") or "held-out data", _evaluation(runs, prefix, names, each, most_rows))
        for prefix, names in shown
    ]
    left_out = _left_out(len(sets) - len(shown), "sets")
    return [*found, ("not shown", block(*left_out, wide=True))] if left_out else found


def _evaluation(runs: Sequence[ComparedRun], prefix: str, names: Sequence[str], most: int, most_rows: int) -> str:
    fragments: list[str] = []
    for name in names[:most]:
        found = [dict(zip(*run.series(name), strict=True)) for run in runs]
        steps = sorted({step for values in found for step in values})
        shown = [steps[round(place * (len(steps) - 1) / (most_rows - 1))] for place in range(most_rows)]
        rows = [
            [f"{step:,}", *(score(values[step]) if step in values else _NOTHING for values in found)]
            for step in (steps if len(steps) <= most_rows else shown)
        ]
        note = f" ({most_rows} of {len(steps):,} steps)" if len(steps) > most_rows else ""
        fragments += [f"<h3>{text(name.removeprefix(prefix))}{note}</h3>", _run_table(["Step"], runs, rows)]
    return block(*fragments, *_left_out(len(names[most:]), "metrics"), wide=True)
