"""What a plan says of tokens that come faster than one controller process takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from backend_batches import run_config, write_model_folder

from spurline import load_config
from spurline.config.run_config import RunConfig
from spurline_async_rl.engines import configs
from spurline_async_rl.engines.configs import ChildProcessEngineConfig, VllmEngineConfig
from spurline_async_rl.source.capacity import capacity_notes, carried_tokens_per_s
from spurline_models import machine
from spurline_models.memory import count_parameters
from spurline_planning.protocols import planned


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return run_config(write_model_folder(tmp_path / "model"))


def write_metrics(run_dir: Path, *lines: dict[str, Any]) -> None:
    run_dir.mkdir(exist_ok=True)
    text = "".join(json.dumps({"step": step, **line}) + "\n" for step, line in enumerate(lines, start=1))
    (run_dir / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_more_tokens_than_one_process_takes_are_said_with_what_to_change(tmp_path: Path) -> None:
    here, elsewhere = (carried_tokens_per_s(streams_here=value) for value in (True, False))
    assert here < elsewhere
    assert capacity_notes(tmp_path, here, streams_here=True) == ()
    [note] = capacity_notes(tmp_path, here + 1, streams_here=True)
    assert f"up to {here + 1:,.0f} tokens/s" in note
    assert "engine.placement: ray" in note
    assert f"about {elsewhere:,.0f}" in note
    assert capacity_notes(tmp_path, here + 1, streams_here=False) == ()
    [note] = capacity_notes(tmp_path, elsewhere + 1, streams_here=False)
    assert "placement" not in note


def test_nothing_is_said_where_nothing_is_known(tmp_path: Path) -> None:
    assert capacity_notes(tmp_path / "no-run", None, streams_here=True) == ()
    write_metrics(tmp_path, {"loss": 1.0})
    assert capacity_notes(tmp_path, None, streams_here=True) == ()


def test_what_a_run_has_measured_counts_more_than_an_estimate(tmp_path: Path) -> None:
    calm = {"controller/cpu_share": 0.2, "controller/tokens_per_s": 9_000.0}
    busy = {"controller/cpu_share": 0.97, "controller/tokens_per_s": 12_000.0}
    write_metrics(tmp_path, *[calm] * 5)
    assert capacity_notes(tmp_path, 1e9, streams_here=True) == ()
    write_metrics(tmp_path, *[busy] * 5)
    [note] = capacity_notes(tmp_path, None, streams_here=True)
    assert "97% of the time in the last 5 steps" in note
    assert "12,000 tokens/s" in note
    # What was long ago says nothing of the run as it is.
    write_metrics(tmp_path, *[busy] * 50, *[calm] * 20)
    assert capacity_notes(tmp_path, None, streams_here=True) == ()


def test_vllm_generates_no_faster_than_its_gpus_read_the_weights(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = VllmEngineConfig(engines=2, max_num_seqs=100, dtype="bfloat16")
    assert config.fastest_tokens_per_s(run, 1_000) is None, "without a GPU"
    monkeypatch.setattr(configs, "gpu_names", lambda: ("NVIDIA H200",))
    small = config.fastest_tokens_per_s(run, 1_000)
    assert small == pytest.approx(200 / 0.005), "a small model is scheduled no faster"
    assert config.fastest_tokens_per_s(run, 50) == pytest.approx(50 / 0.005)
    monkeypatch.setattr(configs, "_SHORTEST_STEP_S", 0.0)
    of_weights = 200 * 4.8e12 / (2 * count_parameters(run.model))
    assert config.fastest_tokens_per_s(run, 1_000) == pytest.approx(of_weights)
    wide = config.model_copy(update={"tensor_parallel_size": 4})
    assert wide.fastest_tokens_per_s(run, 1_000) == pytest.approx(4 * of_weights)
    monkeypatch.setattr(configs, "gpu_names", lambda: ("NVIDIA GeForce GT 710",))
    assert config.fastest_tokens_per_s(run, 1_000) is None, "of an unknown GPU"


def test_engines_say_whether_this_process_takes_each_of_their_tokens() -> None:
    servers = VllmEngineConfig(mode="server", urls=("http://a",))
    streaming = [VllmEngineConfig(), VllmEngineConfig(placement="colocated"), servers]
    assert all(config.streams_here for config in streaming)
    assert not VllmEngineConfig(placement="ray").streams_here
    assert not ChildProcessEngineConfig().streams_here


def test_gpus_are_named_by_what_their_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gpus"
    for number, name in enumerate(("NVIDIA H200", "NVIDIA A100-SXM4-80GB")):
        (folder / f"0000:0{number}:00.0").mkdir(parents=True)
        text = f"Model: \t\t {name}\nIRQ:   \t\t 5{number}\nGPU UUID: \t GPU-1\n"
        (folder / f"0000:0{number}:00.0" / "information").write_text(text, encoding="utf-8")
    machine.gpu_names.cache_clear()
    monkeypatch.setattr(machine, "_GPUS_OF_DRIVER", folder)
    assert machine.gpu_names() == ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    machine.gpu_names.cache_clear()


def test_a_plan_asks_for_as_many_responses_as_are_under_way(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "gpu_names", lambda: ("NVIDIA H200",))
    engine = {"name": "vllm", "engines": 8}
    source = {"name": "async_rollouts", "prompts_per_step": 512, "max_concurrent": 10_000, "correction": "tis"}
    settings = {
        "plugins": ["async_rl"],
        "model": {"path": str(run.model.path), "init": "random"},
        "data": {"train": "unused.jsonl"},
        "steps": 1,
        "source": source | {"environment": {"rewards": "exact_match"}, "engine": engine},
    }

    def notes(**changes: Any) -> list[str]:
        config = load_config(settings | {"source": settings["source"] | changes}).config
        rollouts = planned(config.source)
        assert rollouts is not None
        return [line for line in rollouts.generation_notes(config, 100, None) if line.startswith("controller:")]

    [note] = notes()
    # A quarter of the prompts is under way at a time, by default.
    assert f"up to {128 * 8 / 0.005:,.0f} tokens/s" in note
    assert notes(max_concurrent_groups=16) == []
    assert notes(engine=engine | {"placement": "ray"}) == []
