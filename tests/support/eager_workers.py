"""Let a number of `tokenization.workers` start them for the few rows of a test, as for data that takes long.

`start_for_any_rows` does so in this process; as a plugin (`plugins: [eager_workers]`) it does so in a whole run.
"""

from __future__ import annotations

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
