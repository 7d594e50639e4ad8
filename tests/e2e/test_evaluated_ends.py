"""A run that is evaluated before its first step, and one that an evaluation ends before its last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import fail_at, read_metrics

from spurline import Run, load_config
from spurline.errors import ConfigError, HookFailedError, RunFailedError
from spurline.plugins.hookspecs import hookimpl
from spurline.run.evaluations.evaluation import DataEvaluation
from spurline.trackers.jsonl import read_json_lines
from spurline_insight.report.record import read_record
from spurline_planning.plan import make_plan

Config = dict[str, Any]
Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[Config], Path]


@pytest.fixture
def config(base_config: Config, spurline_chat_file: Path) -> Config:
    """Six steps with an evaluation after each, and one more at the end."""
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {"every_steps": 1}
    base_config["evaluations"] = {"last": {"name": "loss", "data": str(spurline_chat_file)}}
    base_config["checkpoint"] = {"every_minutes": None, "keep_last": 1}
    return base_config


def give_scores(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    left = iter(scores)
    monkeypatch.setattr(DataEvaluation, "metrics", lambda _: ("score",))
    monkeypatch.setattr(DataEvaluation, "evaluate", lambda self, backend: ({"score": next(left)}, []))


def test_a_run_ends_early_finished_saved_and_evaluated_and_goes_on_only_when_told(
    spurline: Spurline, write_config: WriteConfig, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["stop_when"] = {"metric": "eval/score", "patience": 2}
    config["checkpoint"]["keep_best"] = "eval/score"
    give_scores(monkeypatch, 1, 3, 2, 3)
    code, out, err = spurline("train", write_config(config))
    assert (code, err) == (0, ""), err
    why = "eval/score has not got better than 3, of step 2, in 2 evaluations (stop_when.patience: 2)"
    assert f"Finished early at step 4: {why}" in out
    assert "best: eval/score 3 at step 2" in out
    lines = read_metrics(config["run_dir"])
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ["eval/last/loss" in line for line in lines] == [False, False, False, True]
    summary = read_record(Path(config["run_dir"])).summary
    assert (summary["status"], summary["stop_reason"]) == ("finished", why)
    assert {path.name for path in (Path(config["run_dir"]) / "checkpoints").glob("step-*")} == {
        "step-00000002", "step-00000004",
    }  # fmt: skip
    code, out, _ = spurline("train", write_config(config))
    assert code == 0
    assert f"Nothing to do: the run already finished early: {why} at step 4. Change or remove stop_when" in out
    config["stop_when"]["patience"] = 3
    give_scores(monkeypatch, 9, 1)
    assert Run(load_config(config)).train().step == 6


def test_a_resumed_run_ends_where_the_run_itself_would_have(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config["stop_when"] = {"metric": "eval/score", "patience": 3}
    config["checkpoint"]["every_steps"] = 1
    give_scores(monkeypatch, 5, 1, 2)
    fail_at(config, 4)
    give_scores(monkeypatch, 3, 4)
    result = Run(load_config(config)).train()
    assert (result.status, result.step) == ("finished", 4)
    assert result.stop_reason is not None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"metric": "eval/score"}, r"stop_when never stops. Set patience, .* or reaches"),
        ({"metric": "loss", "patience": 1}, r"stop_when.metric is loss, which is no metric of the held-out"),
        ({"metric": "eval/last/loss", "patience": 1}, r"stop_when goes by eval/last/loss, but the run evaluates only"),
        ({"metric": "eval/loss", "reaches": 1, "min_delta": 1}, r"stop_when.min_delta belongs to patience"),
    ],
)
def test_an_end_that_cannot_come_is_an_error(config: Config, setting: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config | {"stop_when": setting})


def test_the_plan_says_when_the_run_may_end_and_what_it_keeps(config: Config) -> None:
    config["stop_when"] = {"metric": "eval/loss", "patience": 2, "reaches": 0.5}
    lines = make_plan(load_config(config)).sections["steps"]
    end = "ends early when eval/loss reaches 0.5 or has not got better in 2 evaluations in a row; less is better"
    assert end in lines
    assert "keeps the last weights, not the best; checkpoint.keep_best: eval/loss keeps those too" in lines


def test_the_model_before_training_is_step_0_and_nothing_else_changes(
    spurline: Spurline, write_config: WriteConfig, config: Config, tmp_path: Path
) -> None:
    config["evaluations"]["last"]["every_steps"] = 4
    without = Run(load_config(config | {"run_dir": str(tmp_path / "without")})).train()
    config["evaluation"]["at_start"] = True
    config["trackers"] = [{"name": "console", "every_steps": 2}]
    code, out, err = spurline("train", write_config(config))
    assert code == 0, err
    assert "eval at step 0/6" in out
    first, *lines = read_metrics(config["run_dir"])
    assert all(name in ("step", "epoch") or name.startswith("eval/") for name in first)
    assert first["step"] == 0
    assert first["eval/loss"] > lines[-1]["eval/loss"]
    others = read_metrics(tmp_path / "without")
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for name in ("loss", "grad_norm", "eval/loss"):
        assert [line[name] for line in lines] == [line[name] for line in others]
    assert without.step == 6
    code, out, err = spurline("report", config["run_dir"])
    assert code == 0, err


def test_step_0_stands_once_after_a_resume_and_after_a_start_from_nothing(config: Config) -> None:
    config["evaluation"]["at_start"] = True
    config["trackers"] = ["tensorboard"]
    fail_at(config, 1)
    fail_at(config, 3)
    config["checkpoint"]["every_steps"] = 1
    fail_at(config, 3)
    Run(load_config(config)).train()
    assert [line["step"] for line in read_metrics(config["run_dir"])] == [0, 1, 2, 3, 4, 5, 6]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(config["run_dir"]) / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 1, 2, 3, 4, 5, 6]


def test_rollouts_are_evaluated_before_the_first_step_too(rl_config: Config, tmp_path: Path) -> None:
    rl_config["data"]["eval"] = rl_config["data"]["train"]
    rl_config["source"]["held_out"] = {"max_prompts": 2, "success": {"reward": "early"}}
    rl_config["steps"] = 2
    Run(load_config(rl_config | {"run_dir": str(tmp_path / "without")})).train()
    rl_config["evaluation"] = {"at_start": True}
    Run(load_config(rl_config)).train()
    first, *lines = read_metrics(rl_config["run_dir"])
    assert first["step"] == 0
    assert "eval/reward" in first
    others = read_metrics(tmp_path / "without")
    for name in ("loss", "reward/mean", "rollout/tokens"):
        assert [line[name] for line in lines] == [line[name] for line in others]


def test_step_0_stands_although_the_evaluation_of_step_1_failed(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["evaluation"]["at_start"] = True
    left = iter([0.0, None, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def evaluate(self: DataEvaluation, backend: object) -> tuple[dict[str, float], list[dict[str, Any]]]:
        score = next(left)
        if score is None:
            raise RunFailedError("a reward")
        return {"score": score}, []

    monkeypatch.setattr(DataEvaluation, "evaluate", evaluate)
    with pytest.raises(RunFailedError, match="a reward"):
        Run(load_config(config)).train()
    Run(load_config(config)).train()
    lines = read_metrics(config["run_dir"])
    assert [(line["step"], line["eval/score"]) for line in lines] == [(step, float(step)) for step in range(7)]


class _FailsAfterEvaluation:
    @hookimpl
    def on_eval_end(self, step: int) -> None:
        raise ZeroDivisionError


def test_answers_of_step_0_are_kept_once(config: Config) -> None:
    generate = {"rewards": {"right": "exact_match"}, "max_new_tokens": 2, "max_samples": 2}
    config["evaluation"] = {"every_steps": 6, "at_start": True, "generate": generate}
    loaded = load_config(config)
    loaded.host.attach(_FailsAfterEvaluation(), "fails")
    with pytest.raises(HookFailedError):
        Run(loaded).train()
    Run(load_config(config)).train()
    answers = read_json_lines(Path(config["run_dir"]) / "eval_samples.jsonl")
    assert [answer["step"] for answer in answers] == [0, 0, 6, 6]


def test_a_misspelled_metric_that_only_an_evaluation_tells_is_found_at_step_0(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataEvaluation, "metrics", lambda _: None)
    config["evaluation"]["at_start"] = True
    config["checkpoint"]["keep_best"] = "eval/los"
    with pytest.raises(ConfigError, match="Did you mean 'eval/loss'"):
        Run(load_config(config)).train()
    assert read_metrics(config["run_dir"]) == []
