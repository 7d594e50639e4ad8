"""Write RUN_DIR/report.html: the panels that the config selects, in one file that opens without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spurline.config.loading import LoadedConfig
from spurline.config.paths import shown_path
from spurline.errors import RunFailedError
from spurline.plugins.registry import Registry
from spurline.run.directory import RunDirectory
from spurline_insight.report.document import write_page
from spurline_insight.report.markup import status_mark, text
from spurline_insight.report.record import read_record, setting
from spurline_insight.report_panel import DEFAULT_ORDER, ReportConfig, ReportPanel, RunRecord


def write_report(record: RunRecord, panels: Sequence[ReportPanel], out: Path) -> Path:
    """Render `panels` in order, write the page to `out`, and return its path.

    If a panel raises an error, the page shows the error in place of the panel.

    Raises:
        RunFailedError: If any panel raised an error. The page is written first. The message names the panels.
    """
    sections: list[tuple[str, str]] = []
    failures: list[tuple[str, Exception]] = []
    for panel in panels:
        try:
            fragment = panel.render(record)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything; the error is raised again below
            failures.append((type(panel).__name__, error))
            fragment = (
                f'<div class="block failure"><p>{text(type(panel).__name__)} could not be drawn:</p>'
                f"<pre>{text(type(error).__name__)}: {text(error)}</pre></div>"
            )
        if fragment is not None:
            sections.append((panel.title, fragment))
    path = record.run_dir.resolve()
    subject = f"Spurline report of <code>{text(path)}</code>"
    write_page(out, f"{path.name} · Spurline report", _header(record, path.name), sections, subject)
    if failures:
        names = ", ".join(f"{name} ({type(error).__name__}: {error})" for name, error in failures)
        raise RunFailedError(
            f"{out}: written, but these report panels failed: {names}. "
            "Leave them out of report.panels, or fix their plugin."
        ) from failures[0][1]
    return out


def _header(record: RunRecord, name: str) -> str:
    status = str(record.summary.get("status", "unknown"))
    finished, total = steps_of(record)
    progress = ""
    if total is not None and finished < total:
        share = f"{100 * finished / total:.1f}%"
        progress = f'<div class="progress" title="{share} of all steps"><span style="width:{share}"></span></div>'
    notice = '<p class="notice">No training step has finished yet: there are no curves yet.</p>'
    error = record.summary.get("error")
    failure = f'<pre class="failure">{text(error)}</pre>' if error else ""
    facts = " · ".join(text(fact) for fact in facts_of(record.config, record.summary))
    return (
        f'<header><div class="title"><h1>{text(name)}</h1>'
        f"{status_mark(status)}</div>"
        f'<p class="facts">{facts}</p>{progress}{failure}</header>\n'
        f"{'' if any(line['step'] for line in record.metrics) else notice}"
    )


def steps_of(record: RunRecord) -> tuple[int, int | None]:
    """Return the last recorded step (0 if there is none) and the total number of steps (None if unknown)."""
    total = record.summary.get("total_steps")
    return int(record.metrics[-1]["step"]) if record.metrics else 0, total if isinstance(total, int) else None


def facts_of(config: Any, summary: Mapping[str, Any]) -> list[str]:
    """Return model, training data, loss, backend and device of a run. Unknown facts are left out."""
    entries = setting(config, "data", "train") or ()
    names = [setting(entry, "label") or setting(entry, "path") for entry in entries]
    data_name = " + ".join(shown_path(str(name)) for name in names if name)
    model = setting(config, "model", "path")
    found = [shown_path(str(model)) if model else None, data_name, setting(config, "loss", "name")]
    backend, device = setting(config, "backend", "name"), summary.get("device")
    return [str(fact) for fact in [*found, backend, device and f"on {device}"] if fact]


def write_run_report(loaded: LoadedConfig, directory: RunDirectory) -> Path:
    """Render RUN_DIR/report.html and return its path."""
    registry, chosen = loaded.host.registry, loaded.config.section(ReportConfig).panels
    if chosen is None:
        panels = default_panels(registry)
    else:
        panels = [registry.create("report_panel", config) for config in chosen]
    return write_report(read_record(directory.path), panels, directory.report)


def default_panels(registry: Registry) -> list[ReportPanel]:
    """Return every registered panel with default settings, sorted by its `order`."""
    entries = [entry for entry in registry.entries() if entry.kind == "report_panel"]
    panels: list[ReportPanel] = [registry.create("report_panel", entry.config(name=entry.name)) for entry in entries]
    return sorted(panels, key=lambda panel: getattr(panel, "order", DEFAULT_ORDER))
