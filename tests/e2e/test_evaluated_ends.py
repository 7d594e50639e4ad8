"""Runs that are evaluated before their first step, and runs that an evaluation ends early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from problems import assert_problem
from run_helpers import Config, Spurline, fail, fail_at, kept_steps, read_metrics, train

from spurline import load_config
from spurline.errors import ConfigError, HookFailedError
from spurline.trackers.jsonl import read_json_lines
from spurline_insight.report.record import read_record


@pytest.fixture
def config(base_config: Config, spurline_chat_file: Path) -> Config:
    """Six steps with an evaluation after each, and one more at the end."""
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {"every_steps": 1}
    base_config["evaluations"] = {"last": {"name": "loss", "data": str(spurline_chat_file)}}
    base_config["checkpoint"] = {"every_minutes": None, "keep_last": 1}
    return base_config


def test_a_run_ends_early_finished_saved_and_evaluated_and_goes_on_only_when_told(
    spurline: Spurline, config: Config, give_scores: Callable[..., None]
) -> None:
    config["stop_when"] = {"metric": "eval/score", "patience": 2}
    config["checkpoint"]["keep_best"] = "eval/score"
    give_scores(1, 3, 2, 3, told=True)
    code, out, err = spurline("train", config)
    assert (code, err) == (0, ""), err
    why = "eval/score has not got better than 3, of step 2, in 2 evaluations (stop_when.patience: 2)"
    assert f"Finished early at step 4: {why}" in out
    assert "best: eval/score 3 at step 2" in out
    lines = read_metrics(config["run_dir"])
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ["eval/last/loss" in line for line in lines] == [False, False, False, True]
    summary = read_record(Path(config["run_dir"])).summary
    assert (summary["status"], summary["stop_reason"]) == ("finished", why)
    assert kept_steps(config["run_dir"]) == [2, 4]
    code, out, _ = spurline("train", config)
    assert (code, "Nothing to do: the run already finished early" in out) == (0, True)
    config["stop_when"]["patience"] = 3
    give_scores(9, 1, told=True)
    assert train(config).step == 6


def test_a_resumed_run_ends_where_the_run_itself_would_have(config: Config, give_scores: Callable[..., None]) -> None:
    config["stop_when"] = {"metric": "eval/score", "patience": 3}
    config["checkpoint"]["every_steps"] = 1
    give_scores(5, 1, 2, told=True)
    fail_at(config, 4)
    give_scores(3, 4, told=True)
    result = train(config)
    assert (result.status, result.step) == ("finished", 4)
    assert result.stop_reason is not None


@pytest.mark.parametrize(
    ("setting", "key", "fix"),
    [
        ({"metric": "eval/score"}, "stop_when", "Set patience"),
        ({"metric": "loss", "patience": 1}, "stop_when.metric", "eval/loss"),
        ({"metric": "eval/last/loss", "patience": 1}, "stop_when", "evaluates only"),
        ({"metric": "eval/loss", "reaches": 1, "min_delta": 1}, "stop_when.min_delta", "belongs to patience"),
    ],
)
def test_an_end_that_cannot_come_is_an_error(config: Config, setting: Config, key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config | {"stop_when": setting})
    assert_problem(caught, key=key, fix=fix)


def test_the_model_before_training_is_step_0_and_nothing_else_changes(spurline: Spurline, config: Config) -> None:
    config["evaluations"]["last"]["every_steps"] = 4
    without = train(config, name="without").lines
    config["evaluation"]["at_start"] = True
    config["trackers"] = [{"name": "console", "every_steps": 2}]
    code, out, err = spurline("train", config)
    assert code == 0, err
    assert "eval at step 0/6" in out
    first, *lines = read_metrics(config["run_dir"])
    assert all(name in ("step", "epoch") or name.startswith("eval/") for name in first)
    assert first["step"] == 0
    assert first["eval/loss"] > lines[-1]["eval/loss"]
    for name in ("step", "loss", "grad_norm", "eval/loss"):
        assert [line[name] for line in lines] == [line[name] for line in without]
    assert spurline("report", config["run_dir"])[0] == 0


def test_step_0_stands_once_after_a_resume_and_after_a_start_from_nothing(config: Config) -> None:
    config["evaluation"]["at_start"] = True
    config["trackers"] = ["tensorboard"]
    fail_at(config, 1)
    fail_at(config, 3)
    config["checkpoint"]["every_steps"] = 1
    fail_at(config, 3)
    train(config)
    assert [line["step"] for line in read_metrics(config["run_dir"])] == [0, 1, 2, 3, 4, 5, 6]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(config["run_dir"]) / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 1, 2, 3, 4, 5, 6]


def test_rollouts_are_evaluated_before_the_first_step_too(rl_config: Config) -> None:
    rl_config["data"]["eval"] = rl_config["data"]["train"]
    rl_config["source"]["held_out"] = {"max_prompts": 2, "success": {"reward": "early"}}
    without = train(rl_config, name="without", steps=2).lines
    first, *lines = train(rl_config, steps=2, evaluation={"at_start": True}).lines
    assert first["step"] == 0
    assert "eval/reward" in first
    for name in ("loss", "reward/mean", "rollout/tokens"):
        assert [line[name] for line in lines] == [line[name] for line in without]


def test_answers_of_step_0_are_kept_once(config: Config) -> None:
    generate = {"rewards": {"right": "exact_match"}, "max_new_tokens": 2, "max_samples": 2}
    config["evaluation"] = {"every_steps": 6, "at_start": True, "generate": generate}
    with pytest.raises(HookFailedError):
        train(config, on_eval_end=fail)
    answers = read_json_lines(train(config).run_dir / "eval_samples.jsonl")
    assert [answer["step"] for answer in answers] == [0, 0, 6, 6]
