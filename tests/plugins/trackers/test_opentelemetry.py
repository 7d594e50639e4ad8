"""The OpenTelemetry tracker against a real receiver of OTLP on the loopback, and what Prometheus scrapes."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver

from spurline.errors import ConfigError
from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import OpenTelemetryTrackerConfig, PrometheusTrackerConfig
from spurline_trackers.opentelemetry import SENT_FILE, OpenTelemetryTracker
from spurline_trackers.prometheus import PrometheusTracker


def opened(run_dir: Path, receiver: OtlpReceiver, resume_step: int = 0) -> OpenTelemetryTracker:
    tracker = OpenTelemetryTracker(OpenTelemetryTrackerConfig(endpoint=receiver.address, timeout_s=2))
    tracker.start(RunInfo(run_dir, resume_step, 3, {}))
    return tracker


def test_steps_arrive_as_gauges_and_events(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        tracker = opened(tmp_path, receiver)
        tracker.log(0, {"eval/loss": 3.0})
        tracker.log(1, {"loss": 2.0})
        tracker.close()
        assert sorted(receiver.steps()) == [0, 1]
        assert receiver.gauges("spurline.loss") == [2.0]
        assert all(record.time_unix_nano for record, _ in receiver.events("spurline.step"))


def test_a_step_that_may_have_arrived_comes_again_with_its_time(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        tracker = opened(tmp_path, receiver)
        tracker.log(1, {"loss": 2.0})
        tracker.log(2, {"loss": 1.0})
        tracker.close()
        # As after a kill between the request with the event of step 2 and its answer.
        sent = (tmp_path / SENT_FILE).read_text().splitlines()
        (tmp_path / SENT_FILE).write_text("\n".join(sent[:4]) + "\n" + sent[4][:7])
        tracker = opened(tmp_path, receiver, resume_step=1)
        tracker.log(2, {"loss": 1.0})
        tracker.log(3, {"loss": 0.5})
        tracker.close()
        assert sorted(receiver.steps()) == [1, 2, 3]
        assert receiver.gauges("spurline.loss") == [2.0, 1.0, 0.5]
        assert len(receiver.events("spurline.step")) == 4


def test_a_receiver_that_is_down_at_the_start_is_an_error(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        receiver.is_down = True
        with pytest.raises(ConfigError, match=r"did not take it.*Start the receiver"):
            opened(tmp_path, receiver)


def test_counters_go_on_from_the_totals_of_the_run_and_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listening.listen()
        config = PrometheusTrackerConfig(port=port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            PrometheusTracker(config).start(RunInfo(tmp_path, 0, 5, {}))
    lines = [{"step": step, "tokens": 10, "eval/pass@4": 0.5} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    tracker = PrometheusTracker(config)
    tracker.start(RunInfo(tmp_path, 2, 5, {}))
    tracker.log(3, {"loss": 1.5, "tokens": 7.0})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode().splitlines()
    tracker.close()
    tracker.close()
    assert {"spurline_steps_total 3.0", "spurline_tokens_total 27.0", "spurline_step 3.0", "spurline_loss 1.5"} < {
        *text
    }
    assert "spurline_eval_pass_4 0.5" in text
