"""Define the component kind `report_panel`, a section of the HTML report, and the settings of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from spurline.config.section import Component, ComponentConfig, Section


class ReportPanelConfig(ComponentConfig):
    """The settings of a panel (a section of the report). The panels of this package have no settings."""

    kind: ClassVar[str] = "report_panel"


class ReportConfig(Section):
    """The HTML page written to RUN_DIR/report.html."""

    enabled: bool = True
    """Write the page when the run ends."""
    panels: tuple[Annotated[ReportPanelConfig, Component("report_panel")], ...] | None = None
    """Panels in page order. If null, the page has every panel of the enabled plugins."""


@dataclass(frozen=True)
class RunRecord:
    """The recorded data of a finished or running run, for panels to show."""

    run_dir: Path
    metrics: Sequence[Mapping[str, float]]
    """One mapping per step, as in metrics.jsonl."""
    config: Mapping[str, Any]
    """The resolved settings."""
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The content of summary.json: counts of data, lengths of samples, versions. It may be empty."""

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have this metric, and their values."""
        points = [(int(line["step"]), float(line[name])) for line in self.metrics if name in line]
        return [step for step, _ in points], [value for _, value in points]


DEFAULT_ORDER = 500


class ReportPanel(Protocol):
    """A section of the report. Factory: `Class(config)`.

    `title` is the heading of the panel. If the config chooses no panels, the report has all panels, sorted by their
    optional attribute `order`, a number whose default is `DEFAULT_ORDER`. Panels of this package have an `order` from
    0 (the summary) to 430, and very long panels have 900 or more.
    """

    title: str

    def render(self, record: RunRecord) -> str | None:
        """Return an HTML fragment that loads nothing, or None if the run has nothing to show here."""
        ...
