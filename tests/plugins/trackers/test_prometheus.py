"""What Prometheus scrapes of a run."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from spurline.errors import ConfigError
from spurline.protocols.tracker import RunInfo
from spurline_trackers.configs import PrometheusTrackerConfig
from spurline_trackers.prometheus import PrometheusTracker


def test_names_become_those_of_prometheus_and_a_metric_keeps_its_last_value() -> None:
    tracker = PrometheusTracker(PrometheusTrackerConfig())
    tracker.log(0, {"eval/loss": 3.0})
    tracker.log(1, {"eval/pass@1": 0.5, "eval/pass_1": 0.6})
    families = text_string_to_metric_families(generate_latest(tracker._registry).decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values == {"spurline_step": 1.0, "spurline_eval_loss": 3.0, "spurline_eval_pass_1": 0.6}


def test_the_address_serves_the_metrics_and_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listening.listen()
        config = PrometheusTrackerConfig(port=port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            PrometheusTracker(config).start(RunInfo(tmp_path, 0, 5, {}))
    tracker = PrometheusTracker(config)
    tracker.start(RunInfo(tmp_path, 2, 5, {}))
    tracker.log(3, {"loss": 1.5})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode().splitlines()
    tracker.close()
    tracker.close()
    assert {"spurline_step 3.0", "spurline_planned_steps 5.0", "spurline_loss 1.5"} < {*text}
    assert f'spurline_run_info{{name="{tmp_path.name}"}} 1.0' in text
