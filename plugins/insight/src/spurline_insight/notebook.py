"""Draw plots that grow while a run trains in a notebook, and give its metrics as a DataFrame.

`Run(loaded, on_step=LivePlot(["loss", "reward/*"])).train()`. Outside of a notebook a LivePlot draws nothing.
"""

from __future__ import annotations

import fnmatch
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from spurline.errors import UserError
from spurline.trackers.jsonl import metrics_frame as metrics_frame
from spurline_insight.report.markup import text
from spurline_insight.report.svg import line_plot

__all__ = ["LivePlot", "metrics_frame"]


class LivePlot:
    """Plots below the cell that are replaced in place as steps are done; for `Run(on_step=...)`.

    One object may follow several runs, one after the other: each gets its own plots.

    Args:
        metrics: One plot each: a metric's name, or a pattern such as `reward/*`, whose metrics share a plot.
        every_s: Least seconds between two pictures; the last picture has all steps.
    """

    def __init__(self, metrics: str | Sequence[str] = ("loss",), *, every_s: float = 1.0) -> None:
        self._patterns = [metrics] if isinstance(metrics, str) else list(metrics)
        if not self._patterns or not all(isinstance(pattern, str) for pattern in self._patterns):
            raise UserError(f"LivePlot({metrics!r}): give names of metrics, such as ['loss', 'reward/*'].")
        self._every_s = every_s
        self._begin()

    def _begin(self) -> None:
        self._series: dict[str, tuple[list[int], list[float]]] = {}
        self._display: str | None = None
        self._drawn_at = float("-inf")
        self._is_drawn, self._has_ended = True, False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._has_ended:
            self._begin()
        for name, value in metrics.items():
            steps, values = self._series.setdefault(name, ([], []))
            steps.append(step)
            values.append(float(value))
        self._is_drawn = False
        if time.monotonic() - self._drawn_at >= self._every_s:
            self._draw()

    def close(self) -> None:
        """Draw the last steps at the end of the run."""
        if not self._is_drawn:
            self._draw()
        self._has_ended = True

    def _repr_html_(self) -> str:
        return "".join(self._plots())

    def _plots(self) -> list[str]:
        plots: list[str] = []
        for pattern in self._patterns:
            names = [name for name in sorted(self._series) if fnmatch.fnmatchcase(name, pattern)]
            if names:
                plots.append(line_plot(pattern, {name: self._series[name] for name in names}))
            elif self._series:
                known = ", ".join(sorted(self._series))
                plots.append(f"<p>No step has a metric {text(pattern)} yet. There are: {text(known)}.</p>")
        return plots

    def _draw(self) -> None:
        self._drawn_at, self._is_drawn = time.monotonic(), True
        if not _is_notebook():
            return
        from IPython.display import HTML, display, update_display

        picture = HTML(self._repr_html_())
        if self._display is None:
            self._display = uuid.uuid4().hex
            display(picture, display_id=self._display)
        else:
            update_display(picture, display_id=self._display)


def _is_notebook() -> bool:
    """Return whether IPython runs in a kernel, and not in a terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
