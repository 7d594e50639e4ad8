"""Settings of the report's panels on asynchronous rollouts. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from spurline_insight.report_panel import ReportPanelConfig


class TimelinePanelConfig(ReportPanelConfig):
    """Draw what was generated, trained and published when."""

    name: str = "rollout_timeline"
    steps: int = Field(default=8, gt=0)
    """Steps drawn; fewer where they hold more groups than can be seen."""


class StalenessPanelConfig(ReportPanelConfig):
    """Show how old the tokens were that were trained on, and what waiting cost."""

    name: str = "staleness"
