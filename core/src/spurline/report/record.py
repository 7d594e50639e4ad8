"""Read what a run left in its directory: the way into the report.

In: RUN_DIR with metrics.jsonl, config.json and summary.json. Out: a `RunRecord`. Works on runs still in progress.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spurline.builtin.trackers.jsonl import METRICS_FILE, read_metrics
from spurline.errors import RunDirectoryError, listing
from spurline.protocols.report_panel import RunRecord

CONFIG_FILE = "config.json"
"""The resolved config, inside the run directory."""
SUMMARY_FILE = "summary.json"
"""Data counts, versions and status, inside the run directory."""


def read_record(run_dir: Path) -> RunRecord:
    """Everything the panels may draw from `run_dir`; a file that does not exist yet counts as empty.

    Raises RunDirectoryError when the folder is missing, is no run directory, or holds an unreadable file.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise RunDirectoryError(f"{run_dir}: no such folder. Give the run_dir of a run, such as runs/default.")
    if not any((run_dir / name).exists() for name in (METRICS_FILE, CONFIG_FILE, SUMMARY_FILE)):
        found = listing(entry.name for entry in list(run_dir.iterdir())[:20])
        raise RunDirectoryError(
            f"{run_dir}: not a run directory: no {METRICS_FILE}, {CONFIG_FILE} or {SUMMARY_FILE}. It has: {found}."
        )
    return RunRecord(
        run_dir=run_dir,
        metrics=read_metrics(run_dir / METRICS_FILE),
        config=_read_mapping(run_dir / CONFIG_FILE),
        summary=_read_mapping(run_dir / SUMMARY_FILE),
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path}: not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise RunDirectoryError(f"{path}: holds a {type(content).__name__}, expected a JSON object.")
    return content
