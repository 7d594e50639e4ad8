"""Test what every report panel must satisfy."""

from __future__ import annotations

from pathlib import Path

from spurline_insight.report_panel import ReportPanel, RunRecord


class ReportPanelContract:
    """A suite of tests for report panels. Subclass it with `make_panel()`."""

    def make_panel(self) -> ReportPanel:
        """Return your panel."""
        raise NotImplementedError("subclass ReportPanelContract with make_panel(self)")

    def test_panel_survives_an_empty_run(self, tmp_path: Path) -> None:
        rendered = self.make_panel().render(RunRecord(tmp_path, [], {}))
        assert rendered is None or isinstance(rendered, str)

    def test_panel_survives_a_run_of_one_step(self, tmp_path: Path) -> None:
        line = {"step": 1, "epoch": 0.1, "loss": 2.0, "lr": 1e-4, "grad_norm": 1.0, "tokens": 99, "time/step": 0.5}
        rendered = self.make_panel().render(RunRecord(tmp_path, [line], {"seed": 0}))
        assert rendered is None or isinstance(rendered, str)

    def test_panel_loads_nothing_from_the_network(self, tmp_path: Path) -> None:
        lines = [{"step": step, "loss": 1.0 / step, "tokens": 9.0, "time/step": 0.1} for step in range(1, 9)]
        rendered = self.make_panel().render(RunRecord(tmp_path, lines, {})) or ""
        assert 'src="http' not in rendered
        assert "url(http" not in rendered

    def test_panel_has_a_title(self) -> None:
        assert self.make_panel().title.strip()
