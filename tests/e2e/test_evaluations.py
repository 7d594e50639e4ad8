"""Several evaluations of one run: each with its data, its rhythm, its names, and one error for what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import reward_functions
from fake_plugins import FakePlugins
from reward_functions import in_process

from spurline import Run, load_config
from spurline.config.loading import LoadedConfig
from spurline.errors import ConfigError, NonFiniteLossError, PluginError
from spurline.plugins import ComponentRegistrar, hookimpl
from spurline.protocols.evaluation import EvaluationConfig
from spurline.trackers.jsonl import read_json_lines
from spurline_insight.report.record import evaluation_losses, evaluation_scores, read_record
from spurline_models.losses.held_out import LossEvaluation
from spurline_planning.plan import make_plan
from spurline_rl.protocols.reward import RewardConfig

Config = dict[str, Any]


@pytest.fixture
def sft(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> Config:
    """Four steps, with the loss on one file and answers to another."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(spurline_chat_file.read_text().splitlines(keepends=True)[:5]))
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "max_length": 128},
        "batch_size": 8,
        "steps": 4,
        "optimizer": {"learning_rate": 1e-3},
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
        "evaluations": {
            "all": {"name": "loss", "data": str(spurline_chat_file), "every_steps": 2},
            "few": {"name": "answers", "data": str(few), "rewards": {"right": "exact_match"}, "max_new_tokens": 4},
        },
    }


@pytest.fixture
def rl(sft: Config, spurline_chat_file: Path) -> Config:
    """Rollouts with two rewards, and a named evaluation by rollouts beside that of `data.eval`."""
    del sft["batch_size"]
    rewards = Path(sft["run_dir"]).parent / "two.py"
    rewards.write_text("def right(answer):\n    return 1.0\n\ndef short(answer):\n    return -0.5\n")
    sft["data"]["eval"] = str(spurline_chat_file)
    sft["source"] = {
        "name": "rollouts",
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "environment": {"rewards": {name: in_process(f"{rewards}:{name}") for name in ("right", "short")}},
        "sampling": {"max_new_tokens": 4},
        "held_out": {"max_prompts": 2, "success": {"reward": "short"}},
    }
    few = sft["evaluations"]["few"]["data"]
    sft["evaluations"] = {
        "hard": {"name": "rollouts", "data": few, "every_steps": 2, "success": {"reward": "right"}},
        "greedy": {"name": "answers", "data": few, "rewards": "exact_match", "max_new_tokens": 4},
    }
    return sft


def train(config: Config, **changes: Any) -> list[dict[str, Any]]:
    loaded = load_config(config | changes)
    Run(loaded).train()
    return read_json_lines(loaded.config.run_dir / "metrics.jsonl")


def evaluated(line: Mapping[str, float]) -> set[str]:
    return {name for name in line if name.startswith("eval/")}


def test_each_evaluation_has_its_rhythm_and_its_names(sft: Config) -> None:
    lines = train(sft)
    assert [evaluated(line) for line in lines[:3]] == [set(), {"eval/all/loss", "eval/all/time"}, set()]
    assert evaluated(lines[3]) == {"eval/all/loss", "eval/all/time", "eval/few/right", "eval/few/time"}


def test_the_held_out_loss_is_the_log_likelihood_whatever_loss_trains(sft: Config) -> None:
    sft["loss"] = "dft"
    line = train(sft)[1]
    assert line["eval/all/loss"] == pytest.approx(line["eval/all/dft/cross_entropy"], rel=1e-6)
    assert 0 < line["eval/all/objective"] < line["eval/all/loss"]


def test_samples_are_marked_by_the_evaluation_that_they_come_from(sft: Config, spurline_chat_file: Path) -> None:
    sft["data"]["eval"] = str(spurline_chat_file)
    sft["evaluation"] = {"generate": {"rewards": {"right": "exact_match"}, "max_samples": 2, "max_new_tokens": 4}}
    train(sft)
    samples = read_json_lines(Path(sft["run_dir"]) / "eval_samples.jsonl")
    assert [sample.get("evaluation") for sample in samples] == [None, None, *["few"] * 5]


def test_the_section_evaluation_measures_what_the_same_evaluations_by_name_do(
    sft: Config, spurline_chat_file: Path, tmp_path: Path
) -> None:
    data, rewards = str(spurline_chat_file), {"right": "exact_match"}
    by_name = {
        "one": {"name": "loss", "data": data},
        "two": {"name": "answers", "data": data, "rewards": rewards, "max_new_tokens": 4},
    }
    sft["data"]["eval"] = data
    *_, last = train(sft, evaluation={"generate": {"rewards": rewards, "max_new_tokens": 4}}, evaluations=by_name)
    assert last["eval/loss"] == last["eval/one/loss"]
    assert last["eval/right"] == last["eval/two/right"]


def test_an_evaluation_changes_nothing_that_is_trained(sft: Config, tmp_path: Path) -> None:
    with_them = train(sft)
    without = train(sft, evaluations={}, run_dir=str(tmp_path / "without"))
    assert [line["loss"] for line in with_them] == [line["loss"] for line in without]


def test_a_named_evaluation_by_rollouts_is_judged_by_its_own_success(rl: Config) -> None:
    lines = train(rl, steps=2)
    last = lines[-1]
    assert (last["eval/pass@1"], last["eval/hard/pass@1"]) == (0.0, 1.0)
    assert last["eval/hard/rewards/short"] == -0.5
    assert last["eval/hard/reward"] == 0.5
    assert "eval/greedy/exact_match" in last
    samples = read_json_lines(Path(rl["run_dir"]) / "eval_samples.jsonl")
    assert {(sample.get("evaluation"), sample.get("passed")) for sample in samples} == {
        (None, False), ("hard", True), ("greedy", None),
    }  # fmt: skip


def test_the_hook_gets_the_metrics_of_all_evaluations_of_a_step_at_once(sft: Config) -> None:
    heard: list[tuple[int, set[str]]] = []

    class Listener:
        @hookimpl
        def on_eval_end(self, step: int, metrics: Mapping[str, float]) -> None:
            heard.append((step, set(metrics)))

    loaded = load_config(sft)
    loaded.host.attach(Listener(), "listener")
    Run(loaded).train()
    assert [step for step, _ in heard] == [2, 4]
    assert {"eval/all/loss", "eval/few/right"} <= heard[1][1]


def test_changed_data_of_one_evaluation_is_noted_by_its_name_when_resuming(
    sft: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    train(sft, steps=2)
    few = Path(sft["evaluations"]["few"]["data"])
    few.write_text(few.read_text().replace("say 3", "say x").replace("say 1", "say y"))
    capsys.readouterr()
    train(sft, evaluations=sft["evaluations"] | {"more": {"name": "loss", "data": str(few)}})
    out = capsys.readouterr().out
    assert "The held-out data of eval/few is not that of the checkpoint" in out
    assert "data of eval/all" not in out
    assert "data of eval/more" not in out


def test_a_plan_and_the_summary_name_the_data_of_each(sft: Config) -> None:
    lines = make_plan(load_config(sft)).sections["data"]
    assert any(line.startswith("eval/all: 64 samples") for line in lines)
    assert any(line == "eval/few: 5 prompts" for line in lines)
    train(sft, steps=1)
    summary = json.loads((Path(sft["run_dir"]) / "summary.json").read_text())
    assert {"train", "eval/all", "eval/few"} == summary["data"].keys()


def test_the_report_tells_losses_and_scores_of_every_evaluation_apart(sft: Config) -> None:
    train(sft)
    record = read_record(Path(sft["run_dir"]))
    assert evaluation_losses(record) == ["eval/all/loss"]
    assert evaluation_scores(record) == (["eval/few/right"], [])


@pytest.mark.parametrize(
    ("evaluations", "message"),
    [
        ({"loss": {"name": "loss", "data": "x.jsonl"}}, r"evaluations\.loss cannot be called so"),
        ({"a b": {"name": "loss", "data": "x.jsonl"}}, r"evaluations\.a b cannot be called so"),
        ({"a": {"name": "loss"}}, r"evaluations\.a\.data is required\. Held-out datasets"),
        ({"a": {"name": "rollouts", "data": "x.jsonl"}}, r"makes attempts at prompts, and the source 'sft' makes none"),
        ({"a": {"name": "losses", "data": "x.jsonl"}}, r"Available: answers, loss, rollouts"),
        ({"a": {"name": "answers", "data": "x.jsonl", "every_step": 1}}, r"Did you mean 'every_steps'"),
    ],
)
def test_what_does_not_fit_is_one_message_before_anything_is_read(
    sft: Config, evaluations: Config, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(sft | {"evaluations": evaluations})


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"name": "loss"}, r"the run's loss, ppo, has no value on held-out tokens"),
        ({"name": "rollouts"}, r"evaluations\.a\.success does not say which reward decides .* Terms: right, short"),
        ({"name": "rollouts", "samples_per_prompt": 2}, "all attempts at a prompt are the same"),
    ],
)
def test_an_evaluation_of_a_run_with_rollouts_is_checked_against_its_source(
    rl: Config, evaluation: Config, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(rl | {"evaluations": {"a": {"data": "x.jsonl", **evaluation}}})


class ClosingConfig(RewardConfig):
    name: str = "closing"


class CarefulConfig(EvaluationConfig):
    name: str = "careful"
    metric: str = "steps"


@pytest.fixture
def third_party(plugins: FakePlugins) -> Callable[[Config], LoadedConfig]:
    """Loads a config with a plugin that brings a reward and an evaluation."""

    def register(registry: ComponentRegistrar) -> None:
        registry.add(ClosingConfig, "reward_functions:Closing")
        registry.add(CarefulConfig, "reward_functions:Careful")

    available = plugins.add("third", register=register)
    return lambda config: load_config(config | {"plugins": ["third"]}, available=available)


@pytest.mark.parametrize("fails", [False, True])
def test_rewards_of_held_out_answers_are_closed_once_also_when_the_run_fails(
    sft: Config, third_party: Callable[[Config], LoadedConfig], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(reward_functions.Closing, "closed", 0)
    sft["data"]["eval"] = sft["evaluations"]["few"]["data"]
    sft["evaluation"] = {"generate": {"rewards": {"closing": "closing"}, "max_new_tokens": 4}}
    sft["evaluations"] = {"named": sft["evaluations"]["few"] | {"rewards": "closing"}}
    if fails:
        sft["optimizer"] = {"learning_rate": 1e30, "max_grad_norm": None}
        with pytest.raises(NonFiniteLossError):
            Run(third_party(sft)).train()
    else:
        Run(third_party(sft)).train()
    assert reward_functions.Closing.closed == 2


def test_a_third_party_adds_an_evaluation_with_a_config_class_and_a_factory(
    sft: Config, third_party: Callable[[Config], LoadedConfig]
) -> None:
    sft["evaluations"] = {"theirs": {"name": "careful", "data": "unread.jsonl", "every_steps": 2}}
    Run(third_party(sft)).train()
    lines = read_json_lines(Path(sft["run_dir"]) / "metrics.jsonl")
    assert [line.get("eval/theirs/steps") for line in lines] == [None, 4.0, None, 4.0]


def test_an_evaluation_that_returns_its_metrics_alone_is_told_what_to_return(
    sft: Config, third_party: Callable[[Config], LoadedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_functions.Careful, "evaluate", lambda *_: {"steps": 1.0, "more": 2.0})
    sft["evaluations"] = {"theirs": {"name": "careful", "data": "unread.jsonl"}}
    with pytest.raises(
        PluginError, match=r"Careful\.evaluate returned a dict instead of two things.*`return metrics, \[\]`"
    ):
        Run(third_party(sft)).train()


def test_the_best_checkpoint_may_go_by_an_evaluation_with_a_name(sft: Config) -> None:
    sft["checkpoint"] = {"keep_best": "eval/all/loss"}
    train(sft)
    best = Path(sft["run_dir"]) / "checkpoints" / "best"
    assert best.read_text().strip().startswith("step-0000000")
    with pytest.raises(ConfigError, match="which no evaluation measures"):
        load_config(sft | {"checkpoint": {"keep_best": "eval/none/loss"}})
    with pytest.raises(ConfigError, match="evaluates only once"):
        load_config(sft | {"checkpoint": {"keep_best": "eval/few/right"}})


def test_a_length_that_does_not_fit_names_the_evaluation_that_asks_for_it(sft: Config) -> None:
    sft["evaluations"]["few"]["max_new_tokens"] = 100_000
    with pytest.raises(ConfigError, match=r"evaluations\.few\.max_new_tokens is 100,000"):
        Run(load_config(sft)).train()


def test_a_mistyped_best_metric_that_only_an_evaluation_tells_is_found_when_it_is_first_made(
    sft: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only at the end, where evaluations of different rhythms are all due together."""
    monkeypatch.setattr(LossEvaluation, "metrics", lambda _: None)
    sft["evaluations"]["few"]["every_steps"] = 3
    sft |= {"steps": 20, "checkpoint": {"keep_best": "eval/all/los"}}
    with pytest.raises(ConfigError, match=r"is eval/all/los, .* Did you mean 'eval/all/loss'"):
        Run(load_config(sft)).train()
    lines = read_json_lines(Path(sft["run_dir"]) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1]


def test_the_best_by_a_named_evaluation_is_judged_when_that_one_is_made(sft: Config) -> None:
    sft["evaluations"]["few"]["every_steps"] = 1
    sft["checkpoint"] = {"keep_best": "eval/all/loss", "keep_last": 1}
    train(sft, steps=5)
    folder = Path(sft["run_dir"]) / "checkpoints"
    lines = {line["step"]: line for line in read_json_lines(Path(sft["run_dir"]) / "metrics.jsonl")}
    scores = {step: line["eval/all/loss"] for step, line in lines.items() if "eval/all/loss" in line}
    assert sorted(scores) == [2, 4, 5]
    assert (folder / "best").read_text() == f"step-{min(scores, key=scores.__getitem__):08d}\n"


def test_a_metric_that_two_evaluations_measure_is_no_silent_choice(sft: Config, spurline_chat_file: Path) -> None:
    sft["data"]["eval"] = str(spurline_chat_file)
    rewards = {"all/loss": "exact_match"}
    sft["evaluation"] = {"generate": {"rewards": rewards, "max_samples": 2, "max_new_tokens": 4}}
    with pytest.raises(ConfigError, match=r"evaluations\.all measures eval/all/loss, which another"):
        Run(load_config(sft)).train()


@pytest.mark.parametrize("metric", ["eval/loss", "eval/al/loss"])
def test_a_best_metric_of_no_evaluation_is_found_before_training(sft: Config, metric: str) -> None:
    message = rf"keep_best\.metric is {metric}, which no evaluation measures: .* Names: all, few"
    with pytest.raises(ConfigError, match=message):
        load_config(sft | {"checkpoint": {"keep_best": metric}})
