"""Let a number of `tokenization.workers` start them for the few rows of a test, as for data that takes long.

`start_for_any_rows` does so in this process; as a plugin (`plugins: [eager_workers]`) it does so in a whole run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl

PLUGIN = Plugin("eager_workers", api=API_VERSION)


def start_for_any_rows(patch: pytest.MonkeyPatch, rows_here: int = 4) -> None:
    """Measure no more than two chunks of `rows_here` rows, and find workers sooner for the rest."""
    from spurline_collation_fast.tokenization import parallel

    patch.setattr(parallel, "ROWS_PER_CHUNK", rows_here)
    patch.setattr(parallel, "TOKENS_PER_CHUNK", 0)
    patch.setattr(parallel, "MEASURE_S", 0.0)
    patch.setattr(parallel, "workers_worth_starting", lambda num_rows, row_s, row_cpu_s, most: min(most, num_rows))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    # The process is the run's own, and ends with it.
    start_for_any_rows(pytest.MonkeyPatch())


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin as its installation looks to the runs that this process starts. folder: for its metadata."""
    metadata = folder / "eager_workers-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: eager-workers\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[spurline.plugins]\neager_workers = eager_workers\n")
    places = [str(folder), str(Path(__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places), prepend=os.pathsep)
