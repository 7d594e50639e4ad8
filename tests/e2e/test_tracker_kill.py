"""kill -9 and resume with several trackers at once: the run goes on as the same run in each store.

SPURLINE_SOAK=1 has all of them, and a longer run.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from every_run import IN_LONG_RUNS
from listening import free_port
from otlp_receiver import OtlpReceiver
from prometheus_client.parser import text_string_to_metric_families
from run_helpers import Config, KillableProcess, config_to_kill, num_lines, read_metrics

LIBRARIES = Path(sys.prefix) / "trackers"
"""`make test` installs these from tests/trackers.txt. Their bounds exclude versions that other tests need."""


@pytest.mark.processes
@pytest.mark.skipif(not LIBRARIES.exists(), reason=f"{LIBRARIES} holds no mlflow, trackio and swanlab: make test")
@pytest.mark.parametrize(
    ("steps", "has_all"),
    # MLflow takes long to import.
    [(9, False), pytest.param(20, True, marks=IN_LONG_RUNS)],
)
def test_a_killed_run_goes_on_as_the_same_run_in_every_store(
    base_config: Config,
    spurline_chat_file: Path,
    killable_process: Callable[..., KillableProcess],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    steps: int,
    has_all: bool,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LIBRARIES), prepend=os.pathsep)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(LIBRARIES)
    database, run_dir = tmp_path / "mlflow.db", Path(base_config["run_dir"])
    port = free_port()
    with OtlpReceiver() as receiver:
        trackers: list[Any] = [
            "trackio",
            {"name": "swanlab", "mode": "offline"},
            {"name": "opentelemetry", "endpoint": receiver.address},
            {"name": "prometheus", "port": port},
        ]
        if has_all:
            trackers.append({"name": "mlflow", "tracking_uri": f"sqlite:///{database}", "tags": {"team": "a"}})
        config = config_to_kill(base_config, spurline_chat_file, steps) | {"trackers": trackers}
        process = killable_process(config)
        process.wait_for_steps(steps // 2, 0.01)
        process.kill()
        assert steps // 2 <= num_lines(run_dir / "metrics.jsonl") < steps
        process = killable_process(config)
        process.wait_for_steps(2)
        scraped = scrape(port)
        assert process.wait(120) == 0, process.said()
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == [*range(1, steps + 1)]
    last = {(name, steps) for name in lines[-1] if name != "step"}
    if has_all:
        assert last <= mlflow_values(database)
    assert last <= trackio_values()
    assert receiver.gauges("spurline.step")[-1] == steps
    assert len(receiver.runs()) == 1
    assert len({path.name for path in (run_dir / "swanlab").glob("run-*/*.swanlab")}) == 1
    assert scraped["spurline_step"] > 2


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def mlflow_values(database: Path) -> set[tuple[str, int]]:
    with sqlite3.connect(database) as connection:
        runs = connection.execute("SELECT run_uuid, status FROM runs").fetchall()
        assert [status for _, status in runs] == ["FINISHED"]
        return set(connection.execute("SELECT key, step FROM metrics").fetchall())


def trackio_values() -> set[tuple[str, int]]:
    (database,) = Path(os.environ["TRACKIO_DIR"]).glob("spurline*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    return {(name, step) for _, step, metrics in rows for name in json.loads(metrics)}
