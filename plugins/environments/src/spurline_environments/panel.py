"""Draw the report panel of runs with several environments: rewards, held-out scores, lengths and draws of each."""

from __future__ import annotations

from collections.abc import Sequence

from spurline_insight.report.figure import Trace, line, one_of_several, series_color, step_figure
from spurline_insight.report.markup import Panel, block, caption, columns, table, text
from spurline_insight.report.record import evaluations_of, recorded_names
from spurline_insight.report_panel import RunRecord

_COUNTS = {"drawn": "drawn", "filtered": "left out for equal rewards", "quarantined": "given up"}


class EnvironmentsPanel(Panel):
    """Plots with a line per environment, and the outcomes of the prompts drawn for each."""

    title = "Environments"
    order = 110

    def render(self, record: RunRecord) -> str | None:
        labels = sorted({name.split("/")[1] for name in recorded_names(record, "env/")})
        if not labels:
            return None
        plots = [
            _plot(record, labels, ["env/{}/reward"], "Reward"),
            _plot(record, labels, [f"{prefix}env/{{}}/pass@1" for prefix in evaluations_of(record)], "Held-out pass@1"),
            _plot(record, labels, ["env/{}/length"], "Response tokens"),
        ]
        totals = [[sum(record.series(f"env/{label}/{name}")[1]) for name in _COUNTS] for label in labels]
        rows = [
            [text(label), f"{drawn - filtered - lost:,.0f}", *(f"{count:,.0f}" for count in (drawn, filtered, lost))]
            for label, (drawn, filtered, lost) in zip(labels, totals, strict=True)
        ]
        head = caption("Mean return of the step's attempts in each environment")
        counts = table(["Environment", "Prompts trained on", *_COUNTS.values()], rows)
        return block(head, columns(*filter(None, plots)), counts, wide=True)


def _plot(record: RunRecord, labels: Sequence[str], names: Sequence[str], title: str) -> str:
    """Draw these metrics of each environment, whose label takes the place of `{}`."""
    traces: list[Trace] = []
    for index, label in enumerate(labels):
        for name in names:
            steps, values = record.series(name.format(label))
            if values and name.startswith("eval/"):
                traces.append(line(label, steps, values, series_color(index), mode="lines+markers"))
            elif values:
                traces += one_of_several(label, steps, values, series_color(index))
    return step_figure(traces, title, label=f"{title} of environments over steps") if traces else ""
