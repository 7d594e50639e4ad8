"""Register panels and the settings of the report, watch each run, and write its report. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from spurline.config.section import OnResume
from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_insight.report_panel import ReportConfig, ReportPanelConfig

if TYPE_CHECKING:
    from spurline.run.run import Run

PLUGIN = Plugin("insight", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add_kind(ReportPanelConfig, "spurline_insight.report_panel:ReportPanel")
    registry.add_section("report", Annotated[ReportConfig, OnResume.FREE])
    for name, panel in _PANELS.items():
        registry.add(ReportPanelConfig, f"spurline_insight.report.panels.{panel}", name=name)


@hookimpl
def on_run_start(run: Run) -> None:
    from spurline_insight.health import Watcher

    Watcher(run)


@hookimpl
def on_run_recorded(run: Run) -> Mapping[str, Path]:
    if not run.config.section(ReportConfig).enabled:
        return {}
    from spurline_insight.report.page import write_run_report

    return {"report": write_run_report(run.loaded, run.directory)}


_PANELS = {
    "summary": "summary:SummaryPanel",
    "health": "summary:HealthPanel",
    "loss": "learning:LossPanel",
    "evaluation": "learning:EvaluationPanel",
    "learning_rate": "learning:LearningRatePanel",
    "gradient": "learning:GradientPanel",
    "throughput": "speed:ThroughputPanel",
    "time_split": "speed:TimeSplitPanel",
    "sample_lengths": "data:SampleLengthsPanel",
    "packing": "data:PackingPanel",
    "samples": "samples:SamplesPanel",
    "config": "summary:ConfigPanel",
}
