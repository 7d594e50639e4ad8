"""Whole runs of reinforcement learning through the command line, on a real model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fake_plugins import FakePlugins
from reward_functions import in_process
from run_helpers import (
    Config,
    Spurline,
    assert_pieces_equal_the_whole,
    assert_same_run,
    assert_same_weights,
    ppo_config,
    read_metrics,
    train,
)

from spurline import load_config
from spurline.errors import CheckpointError, ConfigError, RunFailedError
from spurline.protocols.backend import BackendFacts
from spurline.protocols.source import MODEL_DROPOUT
from spurline.trackers.jsonl import read_json_lines
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.testing import write_tiny_moe_model

BAD_LINES = ('{"messages": []}\n', '{"messages": \n')
"""A row that is malformed, and one that cannot be read."""
HELD_OUT = {"max_prompts": 3, "samples_per_prompt": 2, "temperature": 1.0, "success": {"reward": "early"}}


def test_training_writes_health_metrics_evaluation_and_report(
    spurline: Spurline, rl_config: Config, spurline_chat_file: Path
) -> None:
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["source"]["held_out"] = HELD_OUT
    rl_config["evaluation"] = {"every_steps": 3}
    code, out, err = spurline("train", rl_config)
    assert (code, err) == (0, "")
    assert "Finished at step 6" in out
    assert "64 prompts" in out
    run_dir = Path(rl_config["run_dir"])
    metrics = read_metrics(run_dir)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    expected = {"reward/mean", "reward/std", "rewards/early", "rewards/brevity", "groups/zero_variance", "groups/drawn"}
    expected |= {"mismatch/logprob_diff", "mismatch/kl", "mismatch/ratio_p99", "advantage/std", "response/length"}
    expected |= {"policy/entropy", "policy/clip_fraction_high", "time/generate", "time/look_back", "loss", "grad_norm"}
    for line in metrics:
        assert expected <= line.keys(), expected - line.keys()
        assert line["mismatch/logprob_diff/max"] < 1e-5
        assert line["reward/mean"] == pytest.approx(line["rewards/early"] + 0.1 * line["rewards/brevity"], abs=1e-6)
        assert line["groups/drawn"] == 4
    assert [line["step"] for line in metrics if "eval/pass@2" in line] == [3, 6]
    assert metrics[-1]["epoch"] == pytest.approx(24 / 64)
    samples = read_json_lines(run_dir / "eval_samples.jsonl")
    assert [set(sample["scores"]) for sample in samples] == [{"early", "brevity"}] * 6
    assert (run_dir / "report.html").stat().st_size > 100_000


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.9, "top_k": 64}])
def test_the_trainer_sees_the_logprobs_that_were_sampled_with(rl_config: Config, sampling: Config) -> None:
    rl_config["source"]["sampling"] |= sampling
    for line in train(rl_config, steps=2).lines:
        assert line["mismatch/logprob_diff/max"] < 1e-5


def test_a_resumed_run_is_the_uninterrupted_one(rl_config: Config, tmp_path: Path) -> None:
    rl_config["source"]["sampling"] |= {"top_p": 0.9, "top_k": 40}
    assert_pieces_equal_the_whole(rl_config, tmp_path, [3])


def test_evaluating_does_not_change_what_is_trained(rl_config: Config, spurline_chat_file: Path) -> None:
    run = train(rl_config)
    rl_config["data"]["eval"] = str(spurline_chat_file)
    rl_config["source"]["held_out"] = HELD_OUT
    assert_same_weights(run, train(rl_config, name="evaluated", evaluation={"every_steps": 1}))


def test_a_resume_on_other_prompts_is_refused(rl_config: Config, spurline_chat_file: Path) -> None:
    train(rl_config, steps=2)
    with spurline_chat_file.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}))
    with pytest.raises(CheckpointError, match="file of prompts has changed"):
        train(rl_config)


def test_dynamic_sampling_is_bounded_and_reported(rl_config: Config) -> None:
    rl_config["source"] |= {"zero_variance": "refill", "max_draws_per_step": 9}
    rl_config["source"]["environment"]["rewards"] = {"same": in_process("run_rewards:always_one")}
    del rl_config["source"]["reward_weights"]
    [line] = train(rl_config, steps=1).lines
    assert (line["groups/drawn"], line["groups/filtered"], line["groups/refill_missing"]) == (9, 5, 4)
    assert line["grad_norm"] == 0


def test_prompts_whose_reward_fails_are_given_up_within_a_budget(rl_config: Config) -> None:
    rl_config["source"]["environment"]["rewards"] = {"some": in_process("run_rewards:fails_on_some_rows")}
    rl_config["source"]["faults"] = {"retries": 1}
    del rl_config["source"]["reward_weights"]
    run = train(rl_config, steps=8)
    metrics = run.lines
    lost = sum(line["groups/quarantined"] for line in metrics)
    assert lost > 0
    assert sum(line["groups/retries"] for line in metrics) >= lost
    assert all(line["groups/drawn"] == 4 + line["groups/quarantined"] for line in metrics)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert 0 < len(summary["given_up"]) <= lost, "each row once"
    assert all("chat.jsonl:" in reason and "KeyError" in reason for reason in summary["given_up"])
    assert "Prompts given up" in (run.run_dir / "report.html").read_text()
    rl_config["source"]["faults"]["max_quarantined"] = 0
    with pytest.raises(RunFailedError, match=r"max_quarantined: 0(.|\n)*KeyError"):
        train(rl_config, name="strict")


def test_rows_that_cannot_be_used_are_skipped_and_replaced_and_a_resume_is_exact(
    rl_config: Config, spurline_chat_file: Path, tmp_path: Path
) -> None:
    malformed, unreadable = BAD_LINES
    rows = spurline_chat_file.read_text(encoding="utf-8").splitlines(keepends=True)[:7]
    files = {"train": [*rows[:2], malformed, *rows[2:4], unreadable, *rows[4:]], "eval": [rows[0], malformed, rows[1]]}
    for name, lines in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        rl_config["data"][name] = {"name": "hf", "on_bad_row": "skip", "path": str(tmp_path / f"{name}.jsonl")}
    rl_config["source"] |= {"held_out": {"success": {"reward": "early"}}, "faults": {"max_quarantined": 0}}
    whole = train(rl_config, name="whole")
    assert all((line["groups/drawn"], line["groups/quarantined"]) == (4, 0) for line in whole.lines)
    skipped = sum(line["groups/skipped_rows"] for line in whole.lines)
    assert skipped >= 4, "two rows in each of at least two epochs"
    assert whole.lines[-1]["epoch"] == pytest.approx((24 + skipped) / 9)
    assert whole.lines[-1]["eval/skipped_rows"] == 1
    assert "eval/failed" not in whole.lines[-1]
    for step in (2, 4):
        train(rl_config, stop_after=step)
    assert_same_run(train(rl_config), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 8}, "does not use 'batch_size'"),
        ({"prefetch": "serial"}, "cannot be built ahead"),
        ({"collator": {"name": "packed", "max_tokens": 64}}, "Set collator: rollouts"),
        ({"source": {"sampling": {"top_p": 0.9}}}, "source.sampling.top_p is 0.9, which may keep any number of tokens"),
        ({"source": {"samples_per_prompt": 1}}, "compares the samples of a prompt"),
        ({"source": {"max_draws_per_step": 3}}, "fewer than prompts_per_step: 4"),
        ({"source": {"reward_weights": {"brevitty": 1.0}}}, "Did you mean 'brevity'"),
        ({"source": {"reward_weights": {"overlong": 1.0}}}, "Terms: brevity, early."),
        ({"source": {"held_out": HELD_OUT}}, "source.held_out needs held-out prompts"),
        ({"data": {"train": "a.jsonl", "eval": "b.jsonl"}}, "source.held_out.success does not say which reward"),
        (
            {"data": {"train": "a.jsonl", "eval": "b.jsonl"}, "source": {"held_out": {"success": {"reward": "erly"}}}},
            "source.held_out.success.reward is 'erly'",
        ),
        ({"source": {"held_out": {"samples_per_prompt": 2}}}, "all attempts at a prompt are the same"),
        ({"evaluation": {"batch_size": 8}}, "does not use 'evaluation.batch_size'"),
        ({"loss": "cross_entropy"}, "loss: cross_entropy reads no advantages"),
        ({"loss": "dpo"}, "loss: dpo reads no advantages"),
        ({"loss": "value"}, "loss.name is value, the loss of a critic"),
        (
            {"critic": {"loss": "ppo"}, "source": {"advantage": "gae"}},
            "critic.loss is ppo, which does not train values",
        ),
        ({"backend": {"name": "local", "lora": {"dropout": 0.1}}}, "backend.lora.dropout is 0.1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(rl_config: Config, changes: Config, message: str) -> None:
    source = rl_config["source"] | changes.get("source", {})
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(rl_config | changes | {"source": source})


@pytest.mark.parametrize("setting", MODEL_DROPOUT)
def test_dropout_is_refused_where_logprobs_are_compared(rl_config: Config, setting: str) -> None:
    rl_config["model"]["config_overrides"] = {setting: 0.1}
    key = rf"model\.config_overrides\.{setting}"
    with pytest.raises(ConfigError, match=rf"{key} is 0\.1.*Set {key} to 0"):
        load_config(rl_config)
    rl_config["model"]["config_overrides"] = {setting: 0.0}
    load_config(rl_config)


class ElsewhereConfig(LocalBackendConfig):
    """Computes as `local` does, but its model cannot be borrowed, as if it were in other processes."""

    name: str = "elsewhere"

    @property
    def facts(self) -> BackendFacts:
        return replace(super().facts, lends_model=False, lends_parameters=False)


@pytest.mark.parametrize("narrow", [False, True])
def test_an_engine_with_a_copy_of_the_weights_trains_what_one_that_shares_them_does(
    rl_config: Config, spurline_chat_file: Path, plugins: FakePlugins, narrow: bool
) -> None:
    if narrow:
        # The engine samples from what the master parameters are rounded to.
        rl_config |= {"steps": 2, "report": {"enabled": False}}
        rl_config["source"]["engine"]["precision"] = "bf16"
        rl_config["backend"] |= {"precision": "bf16", "weights": "bf16_masters", "offload_optimizer": True}
    else:
        rl_config["data"]["eval"] = str(spurline_chat_file)
        rl_config["source"]["held_out"] = HELD_OUT
        rl_config["evaluation"] = {"every_steps": 3}
    register = lambda registry: registry.add(ElsewhereConfig, "spurline_models.local.backend:LocalBackend")  # noqa: E731
    available = plugins.add("ranks", register=register)
    backend = {**rl_config["backend"], "name": "elsewhere"}
    copied = train(rl_config, name="copied", available=available, plugins=["ranks"], backend=backend)
    shared = train(rl_config)
    lines = copied.without_times
    for line in lines:
        assert line.pop("sync/bytes") > 0
        assert line["mismatch/logprob_diff/max"] < (0.1 if narrow else 1e-5)
    assert lines == shared.without_times
    assert_same_weights(copied, shared)


def test_policy_and_critic_train_and_a_resumed_run_is_the_uninterrupted_one(base_config: Config) -> None:
    """The whole update path: critic, reference, correction, temperature, fixed norm."""
    config = ppo_config(base_config) | {
        "steps": 4,
        "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 4, "update_epochs": 2},
        "reduction": {"name": "fixed_norm", "length": 8},
    }
    whole = train(config, name="whole")
    train(config, steps=2)
    assert_same_run(train(config), whole)
    for line in whole.lines:
        assert line["critic/grad_norm"] > 0
        assert line["grad_norm"] > 0
        # The engine samples from what the trainer computes at the same temperature.
        assert line["mismatch/logprob_diff/max"] < 1e-4
        assert line["correction/factor"] == pytest.approx(1.0, abs=1e-3)
    assert (whole.run_dir / "checkpoints/step-00000004/backend/critic/optimizer.safetensors").exists()


@pytest.fixture
def replay_config(rl_config: Config, tmp_path: Path) -> Config:
    """A run of a mixture of experts, with the experts that the engine chose."""
    rl_config["model"] = {"path": str(write_tiny_moe_model(tmp_path / "experts"))}
    rl_config["source"]["router_replay"] = True
    return rl_config


@pytest.mark.parametrize("turns", ["separate", "merged"])
def test_rollouts_and_trainer_agree_on_experts_and_a_resumed_run_is_the_uninterrupted_one(
    replay_config: Config, turns: str
) -> None:
    replay_config["source"]["turns"] = turns
    whole = train(replay_config, name="whole", steps=4)
    for line in whole.lines:
        assert line["mismatch/logprob_diff/max"] < 1e-5
        assert line["grad_norm"] > 0
    train(replay_config, steps=2)
    assert_same_run(train(replay_config, steps=4), whole)


def test_a_backend_that_cannot_replay_is_a_problem_of_the_config(replay_config: Config) -> None:
    replay_config["backend"] |= {"compile": True}
    with pytest.raises(ConfigError, match=r"router_replay.* backend 'local' with these settings"):
        load_config(replay_config)
