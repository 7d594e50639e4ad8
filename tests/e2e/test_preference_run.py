"""Training on preference pairs through the same loop: learning, resuming, plugins, plans and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_helpers import Config, assert_pieces_equal_the_whole, train, write_pairs, write_rows

from spurline import load_config
from spurline.errors import CheckpointError, ConfigError, DataError
from spurline.trackers.jsonl import read_json_lines
from spurline_planning.plan import make_plan


@pytest.fixture
def preference_config(base_config: Config, tmp_path: Path) -> Config:
    return {
        **base_config,
        "source": "preference",
        "data": {
            "train": str(write_pairs(tmp_path / "pairs.jsonl", 30, seed=0)),
            "eval": str(write_pairs(tmp_path / "held_out.jsonl", 11, seed=1)),
            "max_length": 64,
        },
        "evaluation": {"every_steps": 3, "batch_size": 4},
        "schedule": "constant",
    }


def test_training_tells_chosen_from_rejected_answers_it_has_not_seen(preference_config: Config) -> None:
    preference_config["evaluation"]["generate"] = {
        "rewards": {"exact": "exact_match"},
        "max_new_tokens": 4,
        "max_samples": 3,
    }
    run = train(preference_config)
    first, *_, last = run.lines
    # Before the first update the model is its own reference.
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert abs(first["preference/margin"]) < 1e-3
    assert last["loss"] < 0.6
    assert last["eval/loss"] < 0.6
    assert last["eval/preference/accuracy"] > 0.9
    assert last["preference/chosen_reward"] - last["preference/rejected_reward"] == pytest.approx(
        last["preference/margin"], abs=1e-6
    )
    assert [line["step"] for line in run.lines if "eval/preference/accuracy" in line] == [3, 6]
    sample = read_json_lines(run.run_dir / "eval_samples.jsonl")[0]
    assert sorted(sample["reference"]) == list(sample["reference"])


def test_a_run_cut_in_pieces_equals_the_uninterrupted_run(preference_config: Config, tmp_path: Path) -> None:
    assert_pieces_equal_the_whole(preference_config, tmp_path, [3])


def test_padded_rows_micro_batches_and_the_fast_plugin_learn_what_packed_rows_learn(preference_config: Config) -> None:
    variants: dict[str, Config] = {
        "packed": {},
        "padded": {"collator": "padded"},
        "microbatches": {"backend": {**preference_config["backend"], "rows_per_microbatch": 1}},
        "fast": {"plugins": ["collation_fast"], "tokenization": {"disable_cache": True}},
    }
    losses = {}
    for name, changes in variants.items():
        lines = train(preference_config, name=name, **changes).lines
        losses[name] = [line["loss"] for line in lines] + [lines[-1]["eval/loss"]]
    for name in ("padded", "microbatches"):
        assert losses[name] == pytest.approx(losses["packed"], rel=1e-3)
    assert losses["fast"] == losses["packed"]
    assert "collation/hidden" in lines[-1], "the plugin collates ahead where it is enabled"


def test_a_plan_says_what_is_counted_and_compared(preference_config: Config) -> None:
    plan = make_plan(load_config(preference_config))
    assert plan.problems == []
    said = {name: "\n".join(lines) for name, lines in plan.sections.items()}
    assert "30 pairs of a chosen and a rejected answer" in said["data"]
    assert "DPO: minus the log-sigmoid of the margin" in said["objective"]
    assert "6 steps of 8 pairs" in said["steps"]


def test_other_pairs_than_the_checkpoint_was_trained_on_are_refused(preference_config: Config, tmp_path: Path) -> None:
    train(preference_config)
    write_pairs(tmp_path / "pairs.jsonl", 30, seed=5)
    with pytest.raises(CheckpointError, match="training data differs from the data of the checkpoint"):
        train(preference_config, steps=8)


def test_a_row_of_which_one_answer_is_unusable_is_left_out_and_counted(
    preference_config: Config, tmp_path: Path
) -> None:
    long = {"prompt": "a", "chosen": "b", "rejected": "c" * 100}
    short = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write_rows(tmp_path / "pairs.jsonl", [long, short])
    data = {"train": str(tmp_path / "pairs.jsonl"), "max_length": 64, "too_long": "drop"}
    run = train(preference_config, data=data, evaluation={}, steps=1)
    facts = json.loads((run.run_dir / "summary.json").read_text())["data"]["train"]
    assert (facts["pairs"], facts["dropped"]) == (1, {"too_long": 1, "other_answer_left_out": 1})


def test_pairs_given_to_the_sft_source_are_recognised(preference_config: Config) -> None:
    with pytest.raises(DataError, match="Set `source: preference`"):
        train(preference_config, source="sft")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "cross_entropy"}, "would train on bad answers"),
        ({"source": "sft", "loss": "dpo"}, "Set source: preference"),
        ({"loss": {"name": "dpo", "label_smoothing": 0.1, "loss_type": "ipo"}}, "label_smoothing is 0.1"),
        ({"backend": {"name": "local", "lora": {"dropout": 0.1}}}, "backend.lora.dropout is 0.1"),
        ({"collator": {"name": "packed", "max_tokens": 100}}, "max_length: 50"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_settings_that_do_not_fit_pairs_are_refused_with_the_fix(
    preference_config: Config, changes: Config, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**preference_config, **changes})
