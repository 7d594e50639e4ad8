"""Offer the contract kit for report panels; see `spurline.testing` for how to use a suite."""

from __future__ import annotations

from pathlib import Path

from spurline_insight.report_panel import ReportPanel, RunRecord

__all__ = ["ReportPanelContract"]


class ReportPanelContract:
    """A suite of tests for report panels. Subclass it with `make_panel()`."""

    def make_panel(self) -> ReportPanel:
        """Return your panel."""
        raise NotImplementedError("subclass ReportPanelContract with make_panel(self)")

    def test_panel_draws_a_run_of_any_length_and_loads_nothing(self, tmp_path: Path) -> None:
        values = {"epoch": 0.1, "loss": 2.0, "lr": 1e-4, "grad_norm": 1.0, "tokens": 99, "time/step": 0.5}
        for num_steps in (0, 1, 8):
            lines = [{"step": step, **values} for step in range(1, num_steps + 1)]
            rendered = self.make_panel().render(RunRecord(tmp_path, lines, {"seed": 0}))
            assert rendered is None or isinstance(rendered, str)
            assert 'src="http' not in (rendered or "")
            assert "url(http" not in (rendered or "")

    def test_panel_has_a_title(self) -> None:
        assert self.make_panel().title.strip()
