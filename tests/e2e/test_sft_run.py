"""A whole SFT run through the command line, on a real model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import (
    Config,
    Spurline,
    WriteConfig,
    assert_pieces_equal_the_whole,
    at,
    fail,
    kept_steps,
    read_metrics,
    train,
    wait_for,
)

from spurline import load_config
from spurline.errors import HookFailedError, RunFailedError, UserError
from spurline.run import directory
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline_insight import health
from spurline_models.local.backend import LocalBackend
from spurline_planning.plan import make_plan
from spurline_rl.rewards.matching import ExactMatch
from spurline_text.sources import sft


def test_training_writes_metrics_checkpoint_report_and_summary(
    spurline: Spurline, base_config: Config, spurline_chat_file: Path
) -> None:
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {
        "every_steps": 3,
        "generate": {"rewards": {"exact": "exact_match"}, "max_new_tokens": 4, "max_samples": 5},
    }
    code, out, err = spurline("train", base_config)
    run_dir = Path(base_config["run_dir"])
    assert (code, err) == (0, "")
    assert "Finished at step 6" in out
    metrics = read_metrics(run_dir)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    for line in metrics:
        assert {"epoch", "loss", "grad_norm", "lr", "tokens", "time/step", "packing/fill"} <= line.keys()
    assert [line["step"] for line in metrics if "eval/loss" in line] == [3, 6]
    assert 0 <= metrics[-1]["eval/exact"] <= 1
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert (run_dir / "report.html").stat().st_size > 100_000
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["data"]["train"]["samples"] == 64
    assert len((run_dir / "eval_samples.jsonl").read_text().splitlines()) == 10
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "latest",
        "step-00000004",
        "step-00000006",
    ]


def test_a_run_cut_in_pieces_equals_the_uninterrupted_run(base_config: Config, tmp_path: Path) -> None:
    del base_config["steps"]
    assert_pieces_equal_the_whole(base_config | {"epochs": 1.5}, tmp_path, [3, 4])


def test_resuming_another_runs_checkpoint_into_a_used_run_dir_is_refused(base_config: Config) -> None:
    foreign = train(base_config, name="other").run_dir / "checkpoints" / "step-00000004"
    train(base_config)
    with pytest.raises(UserError, match="belongs to another run"):
        train(base_config, resume=str(foreign))
    fresh = train(base_config, name="fresh", resume=str(foreign))
    assert kept_steps(fresh) == [4, 6]
    assert fresh.steps == [5, 6]


def test_a_resume_that_fails_to_load_sets_nothing_aside(base_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise MemoryError("too large")

    checkpoints = train(base_config).run_dir / "checkpoints"
    monkeypatch.setattr(LocalBackend, "load", load)
    with pytest.raises(MemoryError):
        train(base_config, resume=str(checkpoints / "step-00000004"))
    assert sorted(entry.name for entry in checkpoints.glob("*step-*")) == ["step-00000004", "step-00000006"]


def test_generated_text_that_no_file_takes_as_it_is_does_not_spoil_a_resume(base_config: Config) -> None:
    record = RunDirectory(Path(base_config["run_dir"]))
    record.path.mkdir()
    files = RunRecordFiles(record, {})
    files.add_samples(1, [{"response": "a\u2028b\x85c\ud83d"}])
    files.add_samples(9, [{"response": "later"}])
    files.start({}, resume_step=4)
    (line,) = record.eval_samples.read_bytes().splitlines()
    assert json.loads(line)["response"] == "a\u2028b\x85c\ud83d"


def test_a_failing_end_of_another_plugin_is_the_error_of_the_run_and_costs_no_warning_and_no_later_run(
    base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = health.Finding("off", "Something is off.", (0,), "", lasts=True)
    monkeypatch.setattr(health, "findings", lambda lines, config: [found])
    with pytest.raises(HookFailedError, match="hook on_run_end: ZeroDivisionError") as raised:
        train(base_config, steps=2, on_run_end=fail)
    summary = json.loads((Path(base_config["run_dir"]) / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", str(raised.value))
    assert [warning["kind"] for warning in summary["warnings"]] == ["off"]
    assert train(base_config, steps=2).status == "finished"


def test_an_unwritable_summary_does_not_hide_what_ended_the_run(
    base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fill_the_disk() -> None:
        monkeypatch.setattr(directory, "write_json", refuse)
        fail()

    with pytest.raises(HookFailedError, match="hook on_step_start: ZeroDivisionError") as raised:
        train(base_config, on_step_start=at(3, fill_the_disk))
    assert any("summary.json could not be written" in note for note in raised.value.__notes__)


def test_a_failing_evaluation_does_not_cost_the_training_before_it(
    base_config: Config, spurline_chat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: ExactMatch, answer: Any) -> float:
        raise KeyError("answer")

    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {"every_steps": 3, "generate": {"rewards": {"exact": "exact_match"}, "max_samples": 2}}
    with monkeypatch.context() as patch:
        patch.setattr(ExactMatch, "score", broken)
        with pytest.raises(RunFailedError, match=r"Reward 'exact' failed on the response.*KeyError") as raised:
            train(base_config)
    assert "Step 3 was trained and saved. Run the same command to evaluate it again" in raised.value.__notes__[0]
    run = train(base_config)
    assert run.steps == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in run.lines if "eval/exact" in line] == [3, 6]
    assert run.without_times == train(base_config, name="whole").without_times


def test_a_finished_run_still_writes_what_it_is_asked_to_export_now(base_config: Config) -> None:
    train(base_config)
    base_config["checkpoint"]["export_hf"] = True
    result = train(base_config)
    assert result.model is not None
    assert (result.model / "config.json").exists()


def test_a_finished_run_whose_end_was_not_recorded_ends_again_and_starts_nothing(
    base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(base_config)
    monkeypatch.setattr(sft.SftSource, "start", lambda *_: pytest.fail("the source was started"), raising=False)
    path = Path(base_config["run_dir"], "summary.json")
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "status": "running"}))
    assert train(base_config).metrics == {}
    assert json.loads(path.read_text())["status"] == "finished"


def test_plan_tells_what_this_machine_lacks_and_repeats_the_overrides(
    spurline: Spurline, write_config: WriteConfig, base_config: Config
) -> None:
    path = write_config(base_config)
    code, out, _ = spurline("plan", path, "--set", "backend.device=cuda", "--set", "batch_size=4")
    assert code == 0
    if not torch.cuda.is_available():
        assert "torch sees no GPU here" in out
    assert f"spurline train {path} --set backend.device=cuda --set batch_size=4" in out
    code, _, err = spurline("plan", path, "--set", "trackers=[wandb]")
    assert code == 2
    assert "pip install" in err


NOT_NEEDED = {
    "datasets",
    "pyarrow",
    "pandas",
    "scipy.stats",
    "sklearn",
    "matplotlib",
    "peft",
    "bitsandbytes",
    "liger_kernel",
} | {"ray", "vllm", "wandb", "tensorboard", "mlflow", "uvicorn", "starlette", "torchvision", "IPython"}
"""Libraries that a run on JSON lines, with no adapter, on one device does without."""


@pytest.mark.processes
def test_sigterm_finishes_the_step_saves_and_resumes_and_nothing_was_imported_that_is_not_needed(
    write_config: WriteConfig, base_config: Config, tmp_path: Path
) -> None:
    plugins = ["collation_fast"] if find_spec("spurline_collation_fast") else []
    base_config |= {"steps": 4000, "checkpoint": {}, "plugins": plugins}
    path = write_config(base_config)
    with (tmp_path / "imported").open("w") as imported:
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "spurline.cli", "train", str(path)],
            stdout=subprocess.PIPE,
            stderr=imported,
            text=True,
        )
    metrics = Path(base_config["run_dir"]) / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, "three steps")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Stopped on request" in out
    last = read_metrics(base_config["run_dir"])[-1]["step"]
    assert (Path(base_config["run_dir"]) / "checkpoints" / f"step-{last:08d}").is_dir()
    lines = [line.rpartition("|")[2].strip() for line in (tmp_path / "imported").read_text().splitlines()]
    assert {"torch", "transformers", "spurline"} <= set(lines)
    assert not NOT_NEEDED.intersection(lines)
    base_config["steps"] = last + 2
    # Fewer steps than before would be refused; the config of the checkpoint said 4000.
    with pytest.raises(Exception, match="steps: 4000"):
        train(base_config)


def test_plan_of_large_data_estimates_steps_from_the_rows_it_read(base_config: Config) -> None:

    base_config |= {"epochs": 2.0, "steps": None}
    exact, estimated = (make_plan(load_config(base_config), row_limit=limit) for limit in (None, 16))
    assert exact.sections["steps"][0].startswith("16 steps of 8 samples")
    assert estimated.sections["steps"][0].startswith("16 steps of 8 samples")
    assert "estimates" in estimated.sections["data"][-1]
    assert "estimates" not in exact.sections["data"][-1]


def test_a_run_with_relative_paths_is_reported_exported_and_resumed_from_another_folder(
    base_config: Config, write_config: WriteConfig, spurline: Spurline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(Path(base_config["data"]["train"]).read_bytes())
    (tmp_path / "model").symlink_to(base_config["model"]["path"])
    base_config["data"]["train"], base_config["model"]["path"] = "rows.jsonl", "model"
    base_config |= {"steps": 2, "schedule": "constant"}
    config = write_config(base_config)
    run_dir = base_config["run_dir"]
    monkeypatch.chdir(tmp_path)
    assert spurline("train", config)[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert spurline("report", run_dir)[0] == 0
    assert spurline("export", run_dir, elsewhere / "exported")[0] == 0
    code, out, _ = spurline("train", config, "--set", "steps=3")
    assert (code, "Finished at step 3" in out) == (0, True)
