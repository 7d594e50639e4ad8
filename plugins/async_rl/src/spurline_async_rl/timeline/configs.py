"""What the report's panels on asynchronous rollouts show. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from spurline_insight.report_panel import ReportPanelConfig


class TimelinePanelConfig(ReportPanelConfig):
    """What was generated, trained and published when."""

    name: str = "rollout_timeline"
    steps: int = Field(default=8, gt=0)
    """Steps drawn in one picture; fewer where they hold more groups than can be seen."""
    last_step: int | None = Field(default=None, gt=0)
    """Draw the steps up to this one; null draws the last ones, and those around the longest wait of a longer run."""


class StalenessPanelConfig(ReportPanelConfig):
    """How old the tokens were that were trained on, and what waiting cost."""

    name: str = "staleness"
