"""Settings of the report."""

from __future__ import annotations

from typing import Annotated

from spurline.config.section import Component, Section
from spurline_insight.report_panel import ReportPanelConfig


class ReportConfig(Section):
    """The HTML page written to RUN_DIR/report.html."""

    enabled: bool = True
    """Write the page when the run ends."""
    panels: tuple[Annotated[ReportPanelConfig, Component("report_panel")], ...] | None = None
    """Panels in page order; null shows every panel of core and of the enabled plugins."""
