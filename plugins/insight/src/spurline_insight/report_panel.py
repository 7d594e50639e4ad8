"""Kind `report_panel`: one section of the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from spurline.config.section import ComponentConfig


class ReportPanelConfig(ComponentConfig):
    """A section of the report without settings."""

    kind: ClassVar[str] = "report_panel"


@dataclass(frozen=True)
class RunRecord:
    """What a finished or running run left behind, as panels read it.

    run_dir: the run's folder. metrics: one mapping per step, as in metrics.jsonl. config: the resolved settings.
    summary: contents of RUN_DIR/summary.json: data counts, sample lengths, versions; may be empty.
    """

    run_dir: Path
    metrics: Sequence[Mapping[str, float]]
    config: Mapping[str, Any]
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, at the steps that have it."""
        points = [(int(line["step"]), float(line[name])) for line in self.metrics if name in line]
        return [step for step, _ in points], [value for _, value in points]


DEFAULT_ORDER = 500


class ReportPanel(Protocol):
    """Draw one section of the report.

    Factory: `Class(config)`.

    title: heading above the panel. A panel may also have a number `order`, which says where it stands on a page for
    which no panels were chosen: smaller ones come first, equal ones as they were registered. Ours have 0 (the summary)
    to 430, and 900 what is very long; without the number it is `DEFAULT_ORDER`.
    """

    title: str

    def render(self, record: RunRecord) -> str | None:
        """An HTML fragment, self-contained but for plotly.js, or None when this run has nothing to show here."""
        ...
