"""Training reward models on pairs and on labelled steps, and reinforcement learning with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_helpers import Config, assert_pieces_equal_the_whole, train, write_pairs, write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from spurline import load_config
from spurline.cli_options import load_run
from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, DataError, UserError
from spurline_models.answering.answers import opened
from spurline_models.export import _write_model
from spurline_planning.plan import make_plan
from spurline_reward_models.configs import ScoredStepsConfig
from spurline_reward_models.source import StepRows
from spurline_rl.trajectory import Group


def rewarding(config: Config, tmp_path: Path, **changes: Any) -> Config:
    """A run that trains a reward model on pairs of sorted and reversed digits."""
    pairs = {
        "plugins": ["reward_models"],
        "run_dir": str(tmp_path / "reward_model"),
        "model": {**config["model"], "head": "score"},
        "source": "preference",
        "loss": {"name": "bradley_terry", "centering": 0.01},
        "data": {
            "train": str(write_pairs(tmp_path / "pairs.jsonl", 30, seed=0)),
            "eval": str(write_pairs(tmp_path / "held_out.jsonl", 11, seed=1)),
            "max_length": 64,
        },
        "evaluation": {"every_steps": 3},
        "schedule": "constant",
        "batch_size": 8,
        "collator": {"name": "packed", "max_tokens": 256},
        "checkpoint": {"every_steps": 2, "export_hf": True},
    }
    return {name: value for name, value in {**config, **pairs, **changes}.items() if name != "minibatches"}


def steps_of(config: Config, tmp_path: Path, **source: Any) -> Config:
    """A run that learns which steps are right: those that say so."""
    rows = [
        {
            "prompt": f"task {number}",
            "completions": [f"step {word}" for word in words],
            "labels": [word == "good" for word in words],
        }
        for number, words in enumerate([("good", "bad", "good"), ("bad", "good"), ("good", "bad")] * 4)
    ]
    data = {"train": str(write_rows(tmp_path / "steps.jsonl", rows)), "max_length": 64}
    return rewarding(config, tmp_path, source={"name": "scored_steps", **source}, loss="step_reward", data=data) | {
        "evaluation": {},
        "steps": 12,
    }


def test_a_reward_model_learns_which_answers_are_better_and_is_the_reward_of_a_run(
    rl_config: Config, tmp_path: Path
) -> None:
    run = train(rewarding({**rl_config, "steps": 12}, tmp_path))
    assert run.lines[-1]["eval/preference/accuracy"] > 0.9
    assert run.lines[-1]["reward_model/confidence"] > 0.5
    scorer = AutoModelForSequenceClassification.from_pretrained(run.run_dir / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "model")

    seen: list[tuple[Group, ...]] = []

    def on_rollouts_scored(step: int, groups: Sequence[Group]) -> None:
        seen.append(tuple(groups))

    source = {**rl_config["source"], "reward_weights": {"quality": 2.0}}
    source["environment"] = {"name": "single_turn", "rewards": {"quality": {"name": "model", "role": "judge"}}}
    held_out = {"data": {**rl_config["data"], "eval": rl_config["data"]["train"]}, "evaluation": {"every_steps": 4}}
    judged = {
        **rl_config,
        **held_out,
        "plugins": ["reward_models"],
        "model": {**rl_config["model"], "frozen": {"judge": {"path": str(run.run_dir / "model"), "head": "score"}}},
        "source": {**source, "held_out": {"max_prompts": 3}},
        "steps": 4,
    }
    assert make_plan(load_config(judged)).problems == []
    for name, unread in (("suffix", "<|im_end|>"), ("request_timeout_s", 5)):
        source["environment"]["rewards"]["quality"][name] = unread
        with pytest.raises(ConfigError, match=f"{name} is for a served model, and a model"):
            load_config(judged)
        del source["environment"]["rewards"]["quality"][name]
    lines = train(judged, on_rollouts_scored=on_rollouts_scored).lines
    terms = []
    for attempt in (attempt for groups in seen for group in groups for attempt in group.trajectories):
        [turn] = attempt.turns
        tokens = torch.tensor([[*turn.prompt_ids, *turn.response_ids]], dtype=torch.int64)
        with torch.no_grad():
            expected = float(scorer(input_ids=tokens).logits)
        assert attempt.rewards["quality"] == pytest.approx(expected, abs=1e-5)
        assert float(turn.rewards.sum()) == pytest.approx(2 * expected, abs=1e-5)
        terms.append(attempt.rewards["quality"])
    assert len({round(term, 6) for term in terms}) > 4
    assert sum(line["rewards/quality"] for line in lines) / len(lines) == pytest.approx(
        sum(terms) / len(terms), rel=1e-4
    )
    assert lines[-1]["eval/rewards/quality"] != 0
    assert_pieces_equal_the_whole(judged, tmp_path, [2])
    assert tokenizer.pad_token_id is not None


@pytest.mark.parametrize("scored", ["all", "last"])
def test_a_process_reward_model_learns_which_steps_are_right(base_config: Config, tmp_path: Path, scored: str) -> None:
    config = steps_of(base_config, tmp_path, scored=scored)
    lines = train(config).lines
    assert (lines[0]["loss_tokens"] == 8) == (scored == "last")
    assert lines[-1]["reward_model/accuracy"] == 1.0
    if scored == "all":
        assert_pieces_equal_the_whole({**config, "steps": 4}, tmp_path, [2])


@pytest.mark.parametrize(
    ("label", "said"), [(2.0, "not a probability"), (-1, "not a probability"), ("good", "is text"), (None, "is null")]
)
def test_a_label_that_the_loss_cannot_read_is_named_with_its_row(
    base_config: Config, tmp_path: Path, label: object, said: str
) -> None:
    config = steps_of(base_config, tmp_path)
    rows = [{"prompt": "task", "completions": ["a", "b"], "labels": [1, label]}] * 2
    data = {"train": str(write_rows(tmp_path / "bad.jsonl", rows)), "max_length": 64}
    with pytest.raises(DataError, match=rf"bad.jsonl:1: labels has a label .*{said}"):
        train({**config, "data": data})
    if label == 2.0:
        loss = {"name": "step_reward", "kind_of_label": "number"}
        assert train({**config, "data": data, "loss": loss, "steps": 1}).lines


@pytest.mark.parametrize(("token", "is_kept"), [("<|im_end|>", False), ("!", False), ("<|pad|>", True)])
def test_an_exported_reward_model_pads_with_no_token_that_ends_a_text(
    spurline_tiny_model: Path, tmp_path: Path, token: str, is_kept: bool
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(spurline_tiny_model)
    tokenizer.add_special_tokens({"eos_token": "!", "pad_token": token})
    shutil.copytree(spurline_tiny_model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "pad_token_id": tokenizer.pad_token_id}))
    model = ModelConfig(path=str(tmp_path / "model"), head="score")
    out = _write_model(lambda *_: None, model, tokenizer, tmp_path / "out")
    padding = json.loads((out / "config.json").read_text())["pad_token_id"]
    assert padding == (tokenizer.pad_token_id if is_kept else None)


def test_runs_that_read_other_columns_share_no_tokens_and_a_moved_tokenizer_changes_none() -> None:
    rows: Any = SimpleNamespace(label="rows", fingerprint=lambda: "rows")

    def fingerprint(columns: dict[str, str], folder: str) -> str:
        opened: Any = SimpleNamespace(dataset=rows, config=SimpleNamespace(columns=columns))
        tokenizer: Any = SimpleNamespace(name_or_path=folder)
        return StepRows(opened, ScoredStepsConfig(), tokenizer, "probability").fingerprint()

    assert fingerprint({}, "a") == fingerprint({}, "b")
    assert fingerprint({}, "a") != fingerprint({"completions": "other"}, "a")


def test_a_model_without_a_vocabulary_is_refused_where_one_is_needed(rl_config: Config, tmp_path: Path) -> None:
    config = rewarding(rl_config, tmp_path)
    for changes, key in (
        ({"loss": "dpo"}, "model.head"),
        ({"model": rl_config["model"]}, "model.head"),
        ({"evaluation": {"generate": {"rewards": "exact_match"}}}, "model.head"),
    ):
        with pytest.raises(ConfigError, match=key):
            load_config({**config, **changes})
    run = train({**config, "steps": 1, "checkpoint": {"export_hf": True}})
    for folder in (run.run_dir, run.run_dir / "model"):
        with pytest.raises(UserError, match=r"gives scores|is a \w+ForSequenceClassification"):
            opened(str(folder), load_run, "latest", lambda _: None)
