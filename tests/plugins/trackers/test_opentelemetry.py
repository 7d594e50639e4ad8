"""The OpenTelemetry tracker against a real receiver of OTLP on the loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver

from spurline.errors import ConfigError
from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import OpenTelemetryTrackerConfig
from spurline_trackers.opentelemetry import OpenTelemetryTracker


def opened(run_dir: Path, receiver: OtlpReceiver) -> OpenTelemetryTracker:
    tracker = OpenTelemetryTracker(OpenTelemetryTrackerConfig(endpoint=receiver.address, timeout_s=2))
    tracker.start(RunInfo(run_dir, 0, 3, {}))
    return tracker


def test_steps_arrive_as_gauges(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        tracker = opened(tmp_path, receiver)
        tracker.log(1, {"loss": 2.0})
        tracker.log(2, {"eval/loss": 3.0})
        tracker.close()
        assert receiver.gauges("spurline.step") == [0, 1, 2]
        assert receiver.gauges("spurline.loss") == [2.0]


def test_a_receiver_that_is_down_at_the_start_is_an_error(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        receiver.is_down = True
        with pytest.raises(ConfigError, match=r"has refused the data.*Start the receiver"):
            opened(tmp_path, receiver)
