"""A whole SFT run through the command line, on a real model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import StopAfter, assert_same_weights, deterministic, read_metrics, wait_for

from spurline import Run, load_config
from spurline.errors import HookFailedError, RunFailedError
from spurline.plugins.hookspecs import hookimpl
from spurline_planning.plan import make_plan

Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[dict[str, Any]], Path]


def test_training_writes_metrics_checkpoint_report_and_summary(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], spurline_chat_file: Path
) -> None:
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {
        "every_steps": 3,
        "generate": {"rewards": {"exact": "exact_match"}, "max_new_tokens": 4, "max_samples": 5},
    }
    code, out, err = spurline("train", write_config(base_config))
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


def test_evaluating_more_often_does_not_change_what_is_trained(
    base_config: dict[str, Any], spurline_chat_file: Path, tmp_path: Path
) -> None:
    losses = []
    for every in (None, 1):
        base_config["run_dir"] = str(tmp_path / f"every-{every}")
        base_config["data"]["eval"] = str(spurline_chat_file)
        base_config["evaluation"] = {
            "every_steps": every,
            "generate": {"rewards": {"exact": "exact_match"}, "max_new_tokens": 3, "max_samples": 4},
        }
        Run(load_config(base_config)).train()
        losses.append([line["loss"] for line in read_metrics(base_config["run_dir"])])
    assert losses[0] == losses[1]


def test_a_run_cut_in_pieces_equals_the_uninterrupted_run(base_config: dict[str, Any], tmp_path: Path) -> None:
    whole = {**base_config, "run_dir": str(tmp_path / "whole"), "epochs": 1.5}
    whole.pop("steps")
    Run(load_config(whole)).train()
    pieces = {**whole, "run_dir": str(tmp_path / "pieces")}
    for stop_after in (3, 4, 99):
        loaded = load_config(pieces)
        loaded.host.attach(StopAfter(stop_after), "stop-after")
        result = Run(loaded).train()
    assert result.status == "finished"
    assert deterministic(read_metrics(pieces["run_dir"])) == deterministic(read_metrics(whole["run_dir"]))
    assert_same_weights(tmp_path / "pieces", tmp_path / "whole")


def test_a_longer_run_continues_a_finished_one(spurline: Spurline, write_config: WriteConfig, base_config: Any) -> None:
    base_config["schedule"] = {"name": "constant"}
    assert spurline("train", write_config(base_config))[0] == 0
    code, out, _ = spurline("train", write_config(base_config), "--set", "steps=8")
    assert code == 0
    assert "steps: 6 -> 8" in out
    assert [line["step"] for line in read_metrics(base_config["run_dir"])] == list(range(1, 9))


def test_resuming_an_older_checkpoint_sets_later_ones_aside(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any]
) -> None:
    path = write_config(base_config)
    assert spurline("train", path)[0] == 0
    before = deterministic(read_metrics(base_config["run_dir"]))
    older = Path(base_config["run_dir"]) / "checkpoints" / "step-00000004"
    code, out, _ = spurline("train", path, "--resume", older)
    assert code == 0
    assert "superseded-step-00000006" in out
    assert deterministic(read_metrics(base_config["run_dir"])) == before


def test_resuming_another_runs_checkpoint_into_a_used_run_dir_is_refused(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], tmp_path: Path
) -> None:
    other = base_config | {"run_dir": str(tmp_path / "other")}
    spurline("train", write_config(other))
    path = write_config(base_config)
    spurline("train", path)
    foreign = tmp_path / "other" / "checkpoints" / "step-00000004"
    code, _, err = spurline("train", path, "--resume", foreign)
    assert code == 2
    assert "belongs to another run" in err
    fresh = base_config | {"run_dir": str(tmp_path / "fresh")}
    code, _, _ = spurline("train", write_config(fresh), "--resume", foreign)
    assert code == 0
    kept = sorted(path.name for path in (tmp_path / "fresh" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000004", "step-00000006"]
    assert [line["step"] for line in read_metrics(tmp_path / "fresh")] == [5, 6]


def test_a_resume_that_fails_to_load_sets_nothing_aside(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline_models.local.backend import LocalBackend

    path = write_config(base_config)
    spurline("train", path)
    monkeypatch.setattr(
        LocalBackend, "load", lambda self, path, digests: (_ for _ in ()).throw(MemoryError("too large"))
    )
    checkpoints = Path(base_config["run_dir"]) / "checkpoints"
    with pytest.raises(MemoryError):
        Run(load_config(path), resume=str(checkpoints / "step-00000004")).train()
    assert sorted(entry.name for entry in checkpoints.glob("*step-*")) == ["step-00000004", "step-00000006"]


def test_a_stop_asked_for_at_the_very_end_of_a_step_still_saves(base_config: dict[str, Any]) -> None:
    loaded = load_config(base_config)
    loaded.host.attach(StopAtStepEnd(3), "stop")
    result = Run(loaded).train()
    assert (result.status, result.step, result.signal) == ("stopped", 3, signal.SIGTERM)
    assert result.checkpoint is not None
    assert result.checkpoint.name == "step-00000003"


def test_generated_text_that_no_file_takes_as_it_is_does_not_spoil_a_resume(
    base_config: dict[str, Any],
) -> None:
    from spurline.run.directory import RunDirectory, RunRecordFiles

    directory = RunDirectory(Path(base_config["run_dir"]))
    directory.path.mkdir()
    files = RunRecordFiles(directory, {})
    files.add_samples(1, [{"response": "a\u2028b\x85c\ud83d"}])
    files.add_samples(9, [{"response": "later"}])
    files.start({}, resume_step=4)
    (line,) = directory.eval_samples.read_bytes().splitlines()
    assert json.loads(line)["response"] == "a\u2028b\x85c\ud83d"


def test_a_failing_run_end_hook_is_the_error_of_a_run_that_had_none(base_config: dict[str, Any]) -> None:
    loaded = load_config(base_config)
    loaded.host.attach(BrokenRunEnd(), "broken")
    with pytest.raises(HookFailedError, match=r"^plugin 'broken', hook on_run_end: ValueError: broken hook") as raised:
        Run(loaded).train()
    assert isinstance(raised.value.__cause__, ValueError)
    summary = json.loads((Path(base_config["run_dir"]) / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", str(raised.value))


def test_an_unwritable_summary_does_not_hide_what_ended_the_run(
    base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline.run import directory

    loaded = load_config(base_config)
    loaded.host.attach(FailAt(3, monkeypatch, directory), "fail")
    with pytest.raises(HookFailedError, match="plugin 'fail', hook on_step_start: ZeroDivisionError") as raised:
        Run(loaded).train()
    assert any("summary.json could not be written" in note for note in raised.value.__notes__)


def test_metrics_that_hooks_see_are_read_only(base_config: dict[str, Any]) -> None:
    loaded = load_config(base_config)
    loaded.host.attach(Meddler(), "meddler")
    with pytest.raises(HookFailedError, match=r"TypeError: .*does not support item assignment"):
        Run(loaded).train()


def test_a_failing_evaluation_does_not_cost_the_training_before_it(
    base_config: dict[str, Any], spurline_chat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline_rl.rewards.matching import ExactMatch

    async def broken(self: ExactMatch, answer: Any) -> float:
        raise KeyError("answer")

    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {"every_steps": 3, "generate": {"rewards": {"exact": "exact_match"}, "max_samples": 2}}
    with monkeypatch.context() as patch:
        patch.setattr(ExactMatch, "score_async", broken)
        with pytest.raises(RunFailedError, match=r"Reward 'exact' failed on the response.*KeyError") as raised:
            Run(load_config(base_config)).train()
    assert "Step 3 itself was trained and saved; the same command evaluates again" in raised.value.__notes__[0]
    assert Run(load_config(base_config)).train().status == "finished"
    metrics = read_metrics(base_config["run_dir"])
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics if "eval/exact" in line] == [3, 6]
    whole = base_config | {"run_dir": base_config["run_dir"] + "-whole"}
    Run(load_config(whole)).train()
    assert deterministic(metrics) == deterministic(read_metrics(whole["run_dir"]))


def test_the_report_of_a_killed_run_says_so(base_config: dict[str, Any]) -> None:
    from spurline.run.directory import RunDirectory
    from spurline_insight.report.page import write_run_report

    Run(load_config(base_config)).train()
    run_dir = Path(base_config["run_dir"])
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    directory = RunDirectory(run_dir)
    assert ">Interrupted<" in write_run_report(load_config(base_config), directory).read_text()
    directory.open()
    try:
        assert ">Running<" in write_run_report(load_config(base_config), RunDirectory(run_dir)).read_text()
    finally:
        directory.close()


def test_a_finished_run_says_that_nothing_is_left_to_do(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any]
) -> None:
    path, run_dir = write_config(base_config), Path(base_config["run_dir"])
    spurline("train", path)
    before = (run_dir / "metrics.jsonl").read_bytes()
    code, out, _ = spurline("train", path)
    assert code == 0
    assert "already finished at step 6" in out
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_line_of_others_that_comes_during_training_does_not_fail_the_run_at_its_end(
    base_config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Path(base_config["run_dir"]) / "metrics.jsonl"

    def write(step: int, _: object) -> None:
        if step == 2:
            metrics.write_text(metrics.read_text() + '{"note": "of others"}\n')

    assert Run(load_config(base_config), on_step=write).train().status == "finished"
    assert "metrics.jsonl:3: no whole number under 'step'" in capsys.readouterr().err


def test_a_finished_run_still_writes_what_it_is_asked_to_export_now(base_config: dict[str, Any]) -> None:
    Run(load_config(base_config)).train()
    base_config["checkpoint"]["export_hf"] = True
    result = Run(load_config(base_config)).train()
    assert result.model is not None
    assert (result.model / "config.json").exists()


def test_a_finished_run_whose_end_was_not_recorded_ends_again(base_config: dict[str, Any]) -> None:
    Run(load_config(base_config)).train()
    path = Path(base_config["run_dir"], "summary.json")
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "status": "running"}))
    assert Run(load_config(base_config)).train().metrics == {}
    assert json.loads(path.read_text())["status"] == "finished"


def test_a_run_directory_can_be_resumed_into_a_new_one(base_config: dict[str, Any], tmp_path: Path) -> None:
    Run(load_config(base_config)).train()
    longer = base_config | {"run_dir": str(tmp_path / "longer"), "steps": 7}
    assert Run(load_config(longer), resume=base_config["run_dir"]).train().step == 7
    assert [line["step"] for line in read_metrics(longer["run_dir"])] == [7]


def test_plan_tells_what_this_machine_lacks_and_repeats_the_overrides(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any]
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


def test_exported_model_loads_and_gives_the_trained_logprobs(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spurline("train", write_config(base_config))
    code, _, _ = spurline("export", base_config["run_dir"], tmp_path / "exported")
    assert code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    saved = load_file(Path(base_config["run_dir"]) / "checkpoints/step-00000006/backend/model.safetensors")
    for name, tensor in model.state_dict().items():
        if name in saved:
            assert torch.equal(tensor, saved[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "exported").iterdir()}
    assert len(modes) == 1, "some files are readable by fewer people than others"


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
    write_config: WriteConfig, base_config: dict[str, Any], tmp_path: Path
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
        Run(load_config(base_config)).train()


def test_python_api_returns_the_result_and_calls_hooks_in_order(base_config: dict[str, Any]) -> None:
    loaded = load_config(base_config)
    calls: list[str] = []
    loaded.host.attach(Recorder(calls), "recorder")
    result = Run(loaded).train()
    assert result.status == "finished"
    assert result.step == 6
    assert result.metrics["loss"] > 0
    assert calls[:4] == ["run_start", "step_start 1", "step_end 1", "step_start 2"]
    # What hooks keep of a step is in the checkpoint that covers it.
    assert calls[-3:] == ["step_end 6", "checkpoint 6", "run_end None"]


def test_one_loaded_config_can_be_trained_twice(base_config: dict[str, Any]) -> None:
    loaded = load_config(base_config)
    assert Run(loaded).train().step == 6
    assert Run(loaded).train().status == "finished"


def test_plan_of_large_data_estimates_steps_from_the_rows_it_read(base_config: dict[str, Any]) -> None:

    base_config |= {"epochs": 2.0, "steps": None}
    exact, estimated = (make_plan(load_config(base_config), row_limit=limit) for limit in (None, 16))
    assert exact.sections["steps"][0].startswith("16 steps of 8 samples")
    assert estimated.sections["steps"][0].startswith("16 steps of 8 samples")
    assert "estimates" in estimated.sections["data"][-1]
    assert "estimates" not in exact.sections["data"][-1]


def test_plan_describes_the_run_without_training(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any]
) -> None:
    code, out, err = spurline("plan", write_config(base_config))
    assert (code, err) == (0, "")
    for expected in ("6 steps of 8 samples", "64 samples", "step 1:", "fill", "MiB", "No problems found"):
        assert expected in out
    assert not Path(base_config["run_dir"]).exists()


def test_padded_and_packed_runs_learn_the_same(base_config: dict[str, Any], tmp_path: Path) -> None:
    losses = []
    for collator in ({"name": "padded"}, {"name": "packed", "max_tokens": 256}):
        base_config |= {"collator": collator, "run_dir": str(tmp_path / collator["name"])}
        Run(load_config(base_config)).train()
        losses.append([line["loss"] for line in read_metrics(base_config["run_dir"])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class StopAtStepEnd(StopAfter):
    @hookimpl
    def on_step_start(self, step: int) -> None:
        """Nothing yet."""

    @hookimpl
    def on_step_end(self, step: int) -> None:
        if step == self._step:
            signal.raise_signal(signal.SIGTERM)


class BrokenRunEnd:
    @hookimpl
    def on_run_end(self) -> None:
        raise ValueError("broken hook")


class FailAt:
    """End the run with an error, on a disk that refuses the summary as well."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch, run_record: Any) -> None:
        self._step, self._monkeypatch, self._run_record = step, monkeypatch, run_record

    @hookimpl
    def on_step_start(self, step: int) -> None:
        if step == self._step:
            self._monkeypatch.setattr(self._run_record, "write_json", self._refuse)
            raise ZeroDivisionError

    @staticmethod
    def _refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")


class Meddler:
    @hookimpl
    def on_step_end(self, metrics: Any) -> None:
        metrics["loss"] = 0.0


class Recorder:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    @hookimpl
    def on_run_start(self) -> None:
        self._calls.append("run_start")

    @hookimpl
    def on_step_start(self, step: int) -> None:
        self._calls.append(f"step_start {step}")

    @hookimpl
    def on_step_end(self, step: int) -> None:
        self._calls.append(f"step_end {step}")

    @hookimpl
    def on_checkpoint_saved(self, step: int) -> None:
        self._calls.append(f"checkpoint {step}")

    @hookimpl
    def on_run_end(self, error: BaseException | None) -> None:
        self._calls.append(f"run_end {error}")
