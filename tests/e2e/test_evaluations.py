"""Evaluations of a run: their data, rhythm and names, before the first step, and as an early end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import reward_functions
from fake_plugins import FakePlugins
from reward_functions import in_process
from run_helpers import Config, Spurline, assert_problem, fail, fail_at, kept_steps, read_metrics, train
from torch import Tensor

from spurline import load_config
from spurline.config.loading import LoadedConfig
from spurline.data.batch import TrainingBatch
from spurline.errors import ConfigError, HookFailedError, NonFiniteLossError, PluginError
from spurline.plugins import ComponentRegistrar
from spurline.protocols.evaluation import EvaluationConfig
from spurline.trackers.jsonl import read_json_lines
from spurline_insight.report.record import evaluation_losses, evaluation_scores, read_record
from spurline_models.losses.cross_entropy import DynamicFineTuning
from spurline_models.losses.held_out import LossEvaluation
from spurline_planning.plan import make_plan
from spurline_rl.protocols.reward import RewardConfig


@pytest.fixture
def sft(base_config: Config, spurline_chat_file: Path, tmp_path: Path) -> Config:
    """Four steps, with the loss on one file and answers to another."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(spurline_chat_file.read_text().splitlines(keepends=True)[:5]))
    base_config["evaluations"] = {
        "all": {"name": "loss", "data": str(spurline_chat_file), "every_steps": 2},
        "few": {"name": "answers", "data": str(few), "rewards": {"right": "exact_match"}, "max_new_tokens": 4},
    }
    return base_config | {"steps": 4, "checkpoint": {}}


@pytest.fixture
def rl(sft: Config, spurline_chat_file: Path) -> Config:
    """Rollouts with two rewards, evaluated on `data.eval` and by two named evaluations."""
    del sft["batch_size"], sft["collator"]
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


def evaluated(line: Mapping[str, float]) -> set[str]:
    return {name for name in line if name.startswith("eval/")}


def test_each_evaluation_has_its_rhythm_and_its_names_everywhere(sft: Config) -> None:
    heard: list[tuple[int, set[str]]] = []
    sft["checkpoint"] = {"keep_best": "eval/all/loss"}
    lines = make_plan(load_config(sft)).sections["data"]
    assert any(line.startswith("eval/all: 64 samples") for line in lines)
    assert any(line == "eval/few: 5 prompts" for line in lines)
    run = train(sft, on_eval_end=lambda step, metrics: heard.append((step, set(metrics))))
    lines = run.lines
    assert [evaluated(line) for line in lines[:3]] == [set(), {"eval/all/loss", "eval/all/time"}, set()]
    assert evaluated(lines[3]) == {"eval/all/loss", "eval/all/time", "eval/few/right", "eval/few/time"}
    assert [step for step, _ in heard] == [2, 4]
    assert {"eval/all/loss", "eval/few/right"} <= heard[1][1]
    record = read_record(run.run_dir)
    assert {"train", "eval/all", "eval/few"} == record.summary["data"].keys()
    assert evaluation_losses(record) == ["eval/all/loss"]
    assert evaluation_scores(record) == (["eval/few/right"], [])
    assert (run.run_dir / "checkpoints" / "best").read_text().startswith("step-0000000")
    # An evaluation changes nothing that is trained.
    without = train(sft, name="without", evaluations={}, checkpoint={})
    assert [line["loss"] for line in lines] == [line["loss"] for line in without.lines]


@pytest.mark.parametrize("prepares", [False, True])
def test_the_held_out_loss_is_the_log_likelihood_whatever_loss_trains(
    sft: Config, monkeypatch: pytest.MonkeyPatch, prepares: bool
) -> None:
    def doubled(loss: object, batch: TrainingBatch, logprobs: object) -> dict[str, Tensor]:
        return {"loss_weights": 2 * batch.tokens["loss_weights"]}

    if prepares:
        monkeypatch.setattr(DynamicFineTuning, "prepares", frozenset({"loss_weights"}), raising=False)
        monkeypatch.setattr(DynamicFineTuning, "prepare", doubled, raising=False)
    line = train(sft, loss="dft", steps=2).lines[-1]
    assert line["eval/all/loss"] == pytest.approx(line["eval/all/dft/cross_entropy"], rel=1e-6)
    assert 0 < line["eval/all/objective"] < line["eval/all/loss"]


def test_the_section_evaluation_measures_what_the_same_evaluations_by_name_do(
    sft: Config, spurline_chat_file: Path
) -> None:
    data, rewards = str(spurline_chat_file), {"right": "exact_match"}
    by_name = {
        "one": {"name": "loss", "data": data},
        "two": {"name": "answers", "data": data, "rewards": rewards, "max_new_tokens": 4, "max_samples": 2},
    }
    sft["data"]["eval"] = data
    section = {"generate": {"rewards": rewards, "max_samples": 2, "max_new_tokens": 4}}
    run = train(sft, evaluation=section, evaluations=by_name)
    last = run.lines[-1]
    assert last["eval/loss"] == last["eval/one/loss"]
    assert last["eval/right"] == last["eval/two/right"]
    samples = read_json_lines(run.run_dir / "eval_samples.jsonl")
    assert [sample.get("evaluation") for sample in samples] == [None, None, "two", "two"]


def test_a_named_evaluation_by_rollouts_is_judged_by_its_own_success(rl: Config) -> None:
    run = train(rl, steps=2)
    last = run.lines[-1]
    assert (last["eval/pass@1"], last["eval/hard/pass@1"]) == (0.0, 1.0)
    assert last["eval/hard/rewards/short"] == -0.5
    assert last["eval/hard/reward"] == 0.5
    assert "eval/greedy/exact_match" in last
    samples = read_json_lines(run.run_dir / "eval_samples.jsonl")
    assert {(sample.get("evaluation"), sample.get("passed")) for sample in samples} == {
        (None, False), ("hard", True), ("greedy", None),
    }  # fmt: skip


def test_changed_data_of_one_evaluation_is_noted_by_its_name_when_resuming(
    sft: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    train(sft, steps=2)
    few = Path(sft["evaluations"]["few"]["data"])
    few.write_text(few.read_text().replace("say 3", "say x").replace("say 1", "say y"))
    capsys.readouterr()
    train(sft, evaluations=sft["evaluations"] | {"more": {"name": "loss", "data": str(few)}})
    out = capsys.readouterr().out
    assert "The held-out data of eval/few has changed since the checkpoint" in out
    assert "data of eval/all" not in out
    assert "data of eval/more" not in out


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"evaluations": {"loss": {"name": "loss", "data": "x.jsonl"}}}, "evaluations.loss", "Rename it"),
        ({"evaluations": {"a b": {"name": "loss", "data": "x.jsonl"}}}, "evaluations.a b", "Rename it"),
        ({"evaluations": {"a": {"name": "loss"}}}, "evaluations.a.data", "is required"),
        ({"evaluations": {"a": {"name": "rollouts", "data": "x.jsonl"}}}, "evaluations.a.name", "'sft' makes none"),
        ({"evaluations": {"a": {"name": "losses", "data": "x.jsonl"}}}, "evaluations.a", "answers, loss, rollouts"),
        ({"checkpoint": {"keep_best": "eval/al/loss"}}, "checkpoint.keep_best.metric", "Names: all, few"),
        ({"checkpoint": {"keep_best": "eval/few/right"}}, "checkpoint.keep_best", "evaluates only once"),
        ({"checkpoint": {"keep_best": "loss"}}, "checkpoint.keep_best.metric", "eval/loss"),
        (
            {"checkpoint": {"keep_best": "eval/loss"}, "evaluations": {}},
            "checkpoint.keep_best.metric",
            "no evaluation measures",
        ),
    ],
)
def test_what_does_not_fit_is_one_message_before_anything_is_read(
    sft: Config, changes: Config, key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(sft | changes)
    assert_problem(caught, key=key, fix=fix)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"name": "loss"}, r"ppo, cannot be computed on held-out tokens"),
        ({"name": "rollouts"}, r"evaluations\.a\.success .* Terms: right, short"),
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
            train(third_party(sft))
    else:
        train(third_party(sft))
    assert reward_functions.Closing.closed == 2


def test_a_third_party_adds_an_evaluation_with_a_config_class_and_a_factory(
    sft: Config, third_party: Callable[[Config], LoadedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    sft["evaluations"] = {"theirs": {"name": "careful", "data": "unread.jsonl", "every_steps": 2}}
    run = train(third_party(sft))
    assert [line.get("eval/theirs/steps") for line in run.lines] == [None, 4.0, None, 4.0]
    monkeypatch.setattr(reward_functions.Careful, "evaluate", lambda *_: {"steps": 1.0, "more": 2.0})
    sft["run_dir"] += "-again"
    with pytest.raises(PluginError, match=r"Careful\.evaluate returned a dict .*`return metrics, \[\]`"):
        train(third_party(sft))


def test_a_mistyped_best_metric_that_only_an_evaluation_tells_is_found_when_it_is_first_made(
    sft: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the end, where evaluations of all rhythms are due together."""
    monkeypatch.setattr(LossEvaluation, "metrics", lambda _: None)
    sft["evaluations"]["few"]["every_steps"] = 3
    sft |= {"steps": 20, "checkpoint": {"keep_best": "eval/all/los"}}
    with pytest.raises(ConfigError, match=r"Did you mean 'eval/all/loss'"):
        train(sft)
    assert [line["step"] for line in read_metrics(sft["run_dir"])] == [1]


def test_the_best_by_a_named_evaluation_is_judged_when_that_one_is_made(sft: Config) -> None:
    sft["evaluations"]["few"]["every_steps"] = 1
    run = train(sft, steps=5, checkpoint={"keep_best": "eval/all/loss", "keep_last": 1})
    scores = {line["step"]: line["eval/all/loss"] for line in run.lines if "eval/all/loss" in line}
    assert sorted(scores) == [2, 4, 5]
    best = min(scores, key=scores.__getitem__)
    assert (run.run_dir / "checkpoints" / "best").read_text() == f"step-{best:08d}\n"


def test_a_metric_that_two_evaluations_measure_is_no_silent_choice(sft: Config, spurline_chat_file: Path) -> None:
    sft["data"]["eval"] = str(spurline_chat_file)
    rewards = {"all/loss": "exact_match"}
    sft["evaluation"] = {"generate": {"rewards": rewards, "max_samples": 2, "max_new_tokens": 4}}
    with pytest.raises(ConfigError, match=r"evaluations\.all measures eval/all/loss, and so does another"):
        train(sft)


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
    why = "eval/score was 3 at step 2 and has not got better in 2 evaluations (stop_when.patience: 2)"
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
        ({"metric": "eval/score"}, "stop_when", "Set `patience`"),
        ({"metric": "loss", "patience": 1}, "stop_when.metric", "eval/loss"),
        ({"metric": "eval/last/loss", "patience": 1}, "stop_when", "evaluates only"),
        ({"metric": "eval/loss", "reaches": 1, "min_delta": 1}, "stop_when.min_delta", "without patience"),
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


def test_answers_of_step_0_are_kept_once(config: Config) -> None:
    generate = {"rewards": {"right": "exact_match"}, "max_new_tokens": 2, "max_samples": 2}
    config["evaluation"] = {"every_steps": 6, "at_start": True, "generate": generate}
    with pytest.raises(HookFailedError):
        train(config, on_eval_end=fail)
    answers = read_json_lines(train(config).run_dir / "eval_samples.jsonl")
    assert [answer["step"] for answer in answers] == [0, 0, 6, 6]
