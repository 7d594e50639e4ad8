"""The report panel about collation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from spurline_collation_fast.panel import CollationPanel
from spurline_insight.report_panel import ReportPanelConfig, RunRecord
from spurline_insight.testing import ReportPanelContract


class TestCollationPanel(ReportPanelContract):
    def make_panel(self) -> CollationPanel:
        return CollationPanel(ReportPanelConfig(name="collation"))


def render(metrics: list[dict[str, float]]) -> str | None:
    return CollationPanel(ReportPanelConfig(name="collation")).render(RunRecord(Path("/nonexistent"), metrics, {}))


def collated(step: int, collate_s: float, wait_s: float, hidden: float) -> dict[str, float]:
    return {"step": step, "time/collate": collate_s, "time/collate_wait": wait_s, "collation/hidden": hidden}


def traces(fragment: str) -> dict[str, dict[str, Any]]:
    plots = [json.loads(content) for content in re.findall(r'class="figure">(.*?)</script>', fragment)]
    return {trace["name"]: trace for plot in plots for trace in plot["data"]}


def test_a_run_that_builds_nothing_ahead_has_no_panel() -> None:
    assert render([{"step": 1, "time/collate": 0.5, "time/collate_wait": 0.5}]) is None


def test_times_and_hidden_share_are_drawn_over_the_steps_that_have_them() -> None:
    fragment = render([collated(1, 0.2, 0.2, 0.0), {"step": 2, "loss": 1.0}, collated(3, 0.4, 0.1, 0.75)])
    assert fragment is not None
    drawn = traces(fragment)
    assert drawn.keys() == {"build", "wait", "hidden"}
    assert (drawn["build"]["x"], drawn["build"]["y"]) == ([1, 3], [0.2, 0.4])
    assert (drawn["wait"]["x"], drawn["wait"]["y"]) == ([1, 3], [0.2, 0.1])
    assert (drawn["hidden"]["x"], drawn["hidden"]["y"]) == ([1, 3], [0.0, 0.75])


def test_the_caption_weighs_the_hidden_share_by_time() -> None:
    fragment = render([collated(1, 0.1, 0.1, 0.0), collated(2, 0.9, 0.0, 1.0), collated(3, 0.2, 0.5, 0.0)])
    assert fragment is not None
    assert "A batch took 400 ms to build; training waited 200 ms for it (means)" in fragment
    assert "75.0% of all building was hidden" in fragment


def test_a_long_run_stays_small() -> None:
    fragment = render([collated(step, 0.2, 0.1, 0.5) for step in range(1, 20_001)])
    assert fragment is not None
    assert all(len(trace["x"]) <= 2000 for trace in traces(fragment).values())
