"""kill -9 and resume with every tracker at once: each step stands once in the stores of the real libraries."""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from otlp_receiver import OtlpReceiver
from prometheus_client.parser import text_string_to_metric_families
from run_helpers import config_to_kill, num_lines, read_metrics, train_for
from warm_runs import WarmRuns

LIBRARIES = Path(sys.prefix) / "trackers"
"""What `make test` installs from tests/trackers.txt: their bounds exclude versions that other tests run with."""
STEPS = 20


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not LIBRARIES.exists(), reason=f"{LIBRARIES} holds no mlflow, trackio and swanlab: make test")
def test_each_step_stands_once_in_every_store_after_a_kill_and_resume(
    base_config: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LIBRARIES), prepend=os.pathsep)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(LIBRARIES)
    database, run_dir = tmp_path / "mlflow.db", Path(base_config["run_dir"])
    port = free_port()
    with OtlpReceiver() as receiver:
        config = config_to_kill(base_config, spurline_chat_file, STEPS) | {
            "trackers": [
                {"name": "console", "start_lines": False},
                {"name": "mlflow", "tracking_uri": f"sqlite:///{database}", "tags": {"team": "a"}},
                "trackio",
                {"name": "swanlab", "mode": "offline"},
                {"name": "opentelemetry", "endpoint": receiver.address},
                {"name": "prometheus", "port": port},
            ]
        }
        path = write_config(config)
        metrics = run_dir / "metrics.jsonl"
        process = train_for(warm_runs, path, metrics, steps=7, wait_s=0.05)
        process.kill()
        process.wait(10)
        killed_at = num_lines(metrics)
        assert 7 <= killed_at < STEPS
        process = train_for(warm_runs, path, metrics, steps=2, wait_s=0)
        scraped = scrape(port)
        assert process.wait(120) == 0, path.with_suffix(".log").read_text()
    lines = read_metrics(run_dir)
    names = {(name, int(line["step"])) for line in lines for name in line if name != "step"}
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]

    assert Counter(mlflow_values(database)) == dict.fromkeys(names, 1)
    assert Counter(trackio_values()) == dict.fromkeys(names, 1)
    assert Counter(swanlab_values(run_dir)) == dict.fromkeys(names, 1)
    # A kill between a request and its answer sends a step again, with its time.
    assert sorted(receiver.steps()) == [*range(1, STEPS + 1)]
    assert Counter(receiver.gauges("spurline.loss")) == dict.fromkeys((line["loss"] for line in lines), 1)

    step = int(scraped["spurline_step"])
    assert scraped["spurline_steps_total"] == step > 6
    assert scraped["spurline_tokens_total"] == sum(line["tokens"] for line in lines[:step])


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def mlflow_values(database: Path) -> list[tuple[str, int]]:
    import sqlite3

    with sqlite3.connect(database) as connection:
        runs = connection.execute("SELECT run_uuid, status FROM runs").fetchall()
        assert [status for _, status in runs] == ["FINISHED"]
        return connection.execute("SELECT key, step FROM metrics").fetchall()


def trackio_values() -> list[tuple[str, int]]:
    import json
    import sqlite3

    (database,) = Path(os.environ["TRACKIO_DIR"]).glob("spurline*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    return [(name, step) for _, step, metrics in rows for name in json.loads(metrics)]


def swanlab_values(run_dir: Path) -> list[tuple[str, int]]:
    from spurline.trackers.swanlab import scalars

    files = sorted((run_dir / "swanlab").glob("run-*/*.swanlab"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1
    return [value for path in files for value in scalars(path)]
