"""`spurline simulate`: what it reads, predicts, recommends and draws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from timelines import leave_timeline

from spurline.cli import main
from spurline.errors import RunFailedError
from spurline_async_rl.timeline.records import encode_record
from spurline_simulation.prediction import compare, figures_of, predictor, recommended, search, steady_run
from spurline_simulation.workload import Knobs, Times, Workload, measured_workload

SOURCE: dict[str, Any] = {
    "name": "async_rollouts",
    "max_staleness": 2,
    "max_concurrent_groups": 4,
    "prompts_per_step": 8,
    "samples_per_prompt": 2,
    "correction": "tis",
    "environment": {"name": "single_turn", "rewards": "exact_match"},
    "advantage": "grpo",
    "engine": "child_process",
}
TIMES = ("--group-seconds", "4", "--sigma", "1", "--step-seconds", "8", "--steps", "6")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, SOURCE)


def write_config(folder: Path, source: dict[str, Any], **changes: Any) -> Path:
    path = folder / "run.yaml"
    settings = {
        "plugins": ["async_rl"],
        "run_dir": str(folder / "run"),
        "model": {"path": "nowhere"},
        "data": {"train": "nowhere.jsonl"},
        "steps": 10,
        "source": source,
    }
    path.write_text(json.dumps(settings | changes))
    return path


def simulate(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *map(str, words)])
    captured = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    code, out, err = simulate(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_table_and_json_compare_the_config_with_other_settings(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = simulate(capsys, config, *TIMES)
    assert code == 0
    rows = [line for line in out.splitlines() if re.match(r"\s*(config|other [SKDBE])\s", line)]
    assert [row.split()[0] for row in rows] == ["config", *["other"] * 5]
    assert rows[0].split()[1:5] == ["2", "8", "4", "1"]
    assert "4 s for a group, lognormal with sigma 1, as given" in out
    found = as_json(capsys, config, *TIMES, "--set", "source.max_staleness=1")
    now = found["config"]
    assert (now["knobs"]["max_staleness"], now["knobs"]["max_running"]) == (1, 4)
    assert (found["steps_simulated"], now["training_groups_per_second"]) == (6, 1.0)
    assert sum(now["figures"]["staleness"].values()) == pytest.approx(1.0)
    assert found["alternatives"].keys() == {"S", "K", "D", "B", "E"}
    assert found["recommended"]["figures"]["groups_per_second"] >= 0.96 * now["figures"]["groups_per_second"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--group-seconds and --step-seconds missing"),
        (("--group-seconds", "4"), ": --step-seconds missing"),
        (("--sigma", "1", "--step-seconds", "4", "--from", "HERE"), "--group-seconds"),
        (("--from", "nowhere"), "nowhere"),
        (("--from", "EMPTY"), "0 groups and 0 steps"),
        (("--group-seconds", "4", "--step-seconds", "1", "--set", "source.max_stalenes=1"), "max_staleness"),
    ],
)
def test_what_is_missing_or_wrong_is_said_with_the_fix(
    config: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    run = config.parent / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    if "HERE" in words:
        leave_timeline(run / "timeline.jsonl", num_steps=30)
    code, _, err = simulate(capsys, config, *(run if word in ("HERE", "EMPTY") else word for word in words))
    assert code == 2
    assert said in err


def test_a_run_of_another_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synchronous = {
        name: value
        for name, value in SOURCE.items()
        if name not in ("max_staleness", "max_concurrent_groups", "correction", "engine")
    }
    path = write_config(tmp_path, synchronous | {"name": "rollouts", "engine": "in_process"})
    code, _, err = simulate(capsys, path, *TIMES)
    assert code == 2
    assert "source.name is rollouts, but only source async_rollouts can be simulated" in err


def test_times_are_read_from_an_earlier_run_and_options_win(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config.parent / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "time/sync_pause": 0.05}\n')
    leave_timeline(run / "timeline.jsonl", num_steps=30)
    workload = measured_workload(run)
    assert workload.train_s.mean == pytest.approx(0.85, abs=0.002)
    assert (workload.transfer_s, workload.pause_s) == pytest.approx((0.1, 0.05), abs=0.002)
    assert workload.batch_size == 8
    assert 0.02 < workload.filtered < 0.1
    found = as_json(capsys, config, "--from", run, "--steps", "4")
    # Its batches had 8 groups too.
    assert found["config"]["training_groups_per_second"] == pytest.approx(8 / 0.85, rel=0.01)
    found = as_json(capsys, config, "--from", run, "--steps", "4", "--step-seconds", "4")
    assert found["config"]["training_groups_per_second"] == 2.0
    assert any("4 s for a step of 8 groups, as given" in line for line in found["basis"])


def balanced(max_running: int, *, sigma: float = 1.0, batch_size: int = 32) -> Workload:
    """Engines and trainer that can do the same: a second for a batch, however many groups share the engines."""
    return Workload(Times([max_running / batch_size], sigma), Times([1.0]), batch_size)


def test_many_groups_at_once_wait_for_the_slowest_of_them() -> None:
    efficiencies = [predictor(balanced(groups), 60)(Knobs(2, 32, groups)).efficiency for groups in (4, 8, 16, 32)]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] > 0.93
    assert efficiencies[-1] < 0.5


def test_groups_that_are_left_out_cost_capacity() -> None:
    workload = Workload(Times([0.25]), Times([1.0]), 32, filtered=0.5)
    assert workload.generation_per_s(Knobs(2, 32, 8), 100) == pytest.approx(16.0)
    prediction = predictor(workload, 30)(Knobs(2, 32, 8))
    assert prediction.figures.groups_per_second == pytest.approx(16.0, rel=0.03)


def test_a_run_without_a_group_to_train_on_ends() -> None:
    knobs, times = Knobs(1, 8, 4), (Times([2.0]), Times([3.0]), 8)
    run, _ = steady_run(Workload(*times, filtered=1.0), knobs, 20)
    assert run.step >= 20, "filtered groups are used at the limit of draws"
    with pytest.raises(RunFailedError, match="cannot be filled"):
        steady_run(Workload(*times, quarantined=1.0), knobs, 20)


def test_the_smallest_bound_that_is_about_as_fast_is_recommended() -> None:
    workload = Workload(Times([0.3], 0.2), Times([1.0]), 8)
    found = search(predictor(workload, 15), Knobs(3, 8, 8))
    best = recommended(found)
    assert best.knobs.max_staleness == 1
    assert best.figures.groups_per_second > 0.96 * max(item.figures.groups_per_second for item in found)


def test_the_advice_names_the_slower_side_and_what_more_engines_would_bring() -> None:
    found = compare(Workload(Times([2.0]), Times([1.0]), 8, 4), Knobs(2, 8, 4), 12)
    assert "Generation is the slower side" in found.advice[0]
    assert re.match(r"4 engines and 16 groups at once would bring [34]\.\d\d times", found.advice[-1])
    found = compare(Workload(Times([0.5], 1.0), Times([1.0]), 16, 8), Knobs(2, 16, 48), 12)
    assert re.search(r"source\.max_concurrent_groups: \d+", found.advice[1])


@pytest.mark.parametrize("max_running", [8, 16])
def test_a_run_predicted_from_its_own_record_comes_out_the_same(tmp_path: Path, max_running: int) -> None:
    knobs = Knobs(2, 16, max_running, depth="full")
    workload = Workload(Times([max_running / 20], 0.8), Times([0.7]), 16, transfer_s=0.05, pause_s=0.05)
    run, first = steady_run(workload, knobs, 120)
    records = run.records[first:]
    (tmp_path / "timeline.jsonl").write_bytes(b"".join(map(encode_record, records)))
    lines = [json.dumps({"step": record.step, "time/sync_pause": 0.05}) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    again = predictor(measured_workload(tmp_path), 120)(knobs).figures
    once = figures_of(run, first)
    assert again.groups_per_second == pytest.approx(once.groups_per_second, rel=0.05)
    assert again.mean_staleness == pytest.approx(once.mean_staleness, rel=0.15)
