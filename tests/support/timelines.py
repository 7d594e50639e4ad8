"""A timeline as a run leaves it, made by the simulation."""

from __future__ import annotations

from pathlib import Path

from spurline_async_rl.timeline.records import encode_record
from spurline_simulation.model import Model
from spurline_simulation.workload import Knobs, Times, Workload


def leave_timeline(path: Path, *, num_steps: int = 12, max_running: int = 6) -> None:
    """Write RUN_DIR/timeline.jsonl of a run whose steps take a second and whose groups take lognormal times."""
    workload = Workload(Times([0.4], 0.8), Times([0.85]), batch_size=8, filtered=1 / 17, transfer_s=0.1, pause_s=0.05)
    run = Model(workload, Knobs(2, 8, max_running, depth="full").limits(num_steps)).finish()
    path.write_bytes(b"".join(map(encode_record, run.records)))
