"""metrics.jsonl: what is on the disk after a step, a full disk and a resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.errors import RunDirectoryError, RunFailedError
from spurline.protocols.tracker import RunInfo
from spurline.trackers.configs import JsonlTrackerConfig
from spurline.trackers.jsonl import JsonlTracker, cut_back, encode_line, read_json_lines, read_metrics

_WRITER = """
import resource, sys
from pathlib import Path
from spurline.trackers.configs import JsonlTrackerConfig
from spurline.trackers.jsonl import JsonlTracker
from spurline.protocols.tracker import RunInfo

tracker = JsonlTracker(JsonlTrackerConfig())
tracker.start(RunInfo(Path(sys.argv[1]), 0, 10**9, {}))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
step = 0
while True:
    step += 1
    tracker.log(step, {"loss": 1 / step, "tokens": 100})
    print(step, flush=True)
"""


def started(run_dir: Path, resume_step: int = 0) -> JsonlTracker:
    tracker = JsonlTracker(JsonlTrackerConfig())
    tracker.start(RunInfo(run_dir, resume_step, 100, {}))
    return tracker


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in read_json_lines(path)]


def test_a_logged_step_is_readable_before_the_tracker_is_closed(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"loss": 2.5, "tokens": 640})
    assert read_json_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5, "tokens": 640}]
    tracker.close()
    tracker.close()


def test_keys_come_in_the_same_order_whatever_order_they_were_measured_in() -> None:
    forward = encode_line(3, {"time/step": 1.0, "loss": 2.0, "eval/loss": 3.0, "epoch": 0.5})
    backward = encode_line(3, {"epoch": 0.5, "eval/loss": 3.0, "loss": 2.0, "time/step": 1.0})
    assert forward == backward
    assert list(json.loads(forward)) == ["step", "epoch", "loss", "eval/loss", "time/step"]


def test_half_a_surrogate_pair_in_a_name_can_be_written() -> None:
    assert json.loads(encode_line(1, {"reward/\ud83d": 0.5}))["reward/\ud83d"] == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_refused_by_name(value: float) -> None:
    with pytest.raises(RunFailedError, match="Metric 'grad_norm' of step 7"):
        encode_line(7, {"loss": 1.0, "grad_norm": value})


@settings(max_examples=60, deadline=None)
@given(last=st.integers(0, 12), resume_step=st.integers(0, 15), torn=st.integers(0, 40))
def test_resume_keeps_exactly_the_complete_lines_up_to_its_step(last: int, resume_step: int, torn: int) -> None:
    lines = [encode_line(step, {"loss": step / 3, "note/ü": 1.0}) for step in range(1, last + 1)]
    tail = encode_line(last + 1, {"loss": 0.25, "note/ü": 1.0})[:torn].rstrip(b"\n").rstrip(b"}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(b"".join(lines) + tail)
        started(Path(folder), resume_step).close()
        assert path.read_bytes() == b"".join(lines[:resume_step])
        assert [entry.name for entry in Path(folder).iterdir()] == ["metrics.jsonl"]


def test_an_unreadable_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2: unreadable line"):
        read_json_lines(path)


def test_rubbish_that_a_power_cut_left_after_the_checkpoint_is_cut_off(tmp_path: Path) -> None:
    good = encode_line(1, {"loss": 1.0}) + encode_line(2, {"loss": 0.5})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(good + b"\0" * 64 + b"\n" + encode_line(4, {"loss": 0.1}))
    cut_back(path, 2)
    assert path.read_bytes() == good
    path.write_bytes(good + b"\0" * 64 + b"\n")
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:3"):
        cut_back(path, 3)


def test_flush_forces_the_lines_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"loss": 1.0})
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    tracker.flush()
    assert len(synced) == 1
    tracker.close()


@pytest.mark.processes
def test_a_full_disk_ends_the_run_with_the_file_named_and_earlier_steps_intact(tmp_path: Path) -> None:
    writer = subprocess.run([sys.executable, "-c", _WRITER, str(tmp_path)], capture_output=True, text=True)
    assert "RunFailedError" in writer.stderr
    assert "metrics.jsonl: cannot be written" in writer.stderr
    assert "MiB free" in writer.stderr
    reported = [int(line) for line in writer.stdout.split()]
    assert len(reported) > 3
    assert steps_of(tmp_path / "metrics.jsonl") == reported
    assert (tmp_path / "metrics.jsonl").stat().st_size == 500


FOREIGN = ['{"step": 2, "loss": "low"}', '{"loss": 1.0}', '{"step": true}', "[2]", "step 2: loss 0.5"]


@pytest.mark.parametrize("line", FOREIGN)
def test_a_line_of_others_stops_a_resume_and_may_be_left_out_of_a_report(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    assert [found["step"] for found in read_metrics(path, skip_foreign=True)] == [1, 3]
    assert "metrics.jsonl:2" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2"):
        read_metrics(path)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl"):
        started(tmp_path, 3)
