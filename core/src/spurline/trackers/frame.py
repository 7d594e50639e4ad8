"""The metrics of a run as a pandas DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spurline.errors import UserError
from spurline.trackers.jsonl import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    import pandas


def metrics_frame(run_dir: Path | str) -> pandas.DataFrame:
    """One row for each step that the run has recorded, indexed by `step`; a column for each metric, NaN where a step
    has none.

    Empty for a run that has recorded nothing. Raises UserError without pandas, and where there is no such folder.
    """
    try:
        import pandas
    except ImportError as error:
        raise UserError("metrics_frame needs pandas. Install it: pip install pandas") from error
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run directory.")
    lines = read_metrics(folder / METRICS_FILE)
    frame = pandas.DataFrame.from_records(lines) if lines else pandas.DataFrame({"step": pandas.Series(dtype="int64")})
    return frame.set_index("step")
