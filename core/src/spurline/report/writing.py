"""Write the report of a run directory with the panels its config selects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spurline.config.loading import LoadedConfig
from spurline.config.section import ComponentConfig
from spurline.protocols.report_panel import ReportPanel
from spurline.registry import CORE, Registry
from spurline.report.page import write_report
from spurline.report.record import read_record
from spurline.run_directory import RunDirectory

_LAST = ("samples", "config")
"""Core's panels that fill pages; below them nobody looks for another one."""


def write_run_report(loaded: LoadedConfig, directory: RunDirectory) -> Path:
    """Render RUN_DIR/report.html from what the run left behind; returns its path."""
    registry = loaded.host.registry
    configs = loaded.config.report.panels
    panels: list[ReportPanel] = [
        registry.create("report_panel", config)
        for config in (configs if configs is not None else default_panels(registry))
    ]
    record = read_record(directory.path)
    if record.summary.get("status") == "running" and not directory.is_in_use():
        # Its process died without a word: killed, or the machine went down.
        record = replace(record, summary={**record.summary, "status": "interrupted"})
    return write_report(record, panels, directory.report)


def default_panels(registry: Registry) -> list[ComponentConfig]:
    """Every registered panel with default settings: core's, then those of plugins, and the long ones at the end."""
    entries = [entry for entry in registry.entries() if entry.kind == "report_panel"]
    # A stable sort: all others keep the order of registration.
    entries.sort(key=lambda entry: entry.plugin == CORE and entry.name in _LAST)
    return [entry.config(name=entry.name) for entry in entries]
