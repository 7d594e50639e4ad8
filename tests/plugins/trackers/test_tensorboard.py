"""TensorBoard event files, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import TensorboardTrackerConfig
from spurline_trackers.tensorboard import TensorboardTracker


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def started(run_dir: Path, resume_step: int = 0) -> TensorboardTracker:
    tracker = TensorboardTracker(TensorboardTrackerConfig())
    tracker.start(RunInfo(run_dir, resume_step, 10, {"optimizer": {"learning_rate": 1e-3}, "run_dir": run_dir}))
    return tracker


def test_scalars_read_back_under_their_metric_names(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"loss": 2.5, "time/step": 0.25})
    tracker.log(2, {"loss": 1.5, "eval/loss": 2.0})
    tracker.close()
    tracker.close()
    assert read_scalars(tmp_path) == {"loss": [(1, 2.5), (2, 1.5)], "time/step": [(1, 0.25)], "eval/loss": [(2, 2.0)]}


def test_flushed_steps_are_in_the_file_before_the_tracker_is_closed(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"loss": 2.5})
    tracker.flush()
    assert read_scalars(tmp_path)["loss"] == [(1, 2.5)]
    tracker.close()
