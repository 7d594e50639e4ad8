"""Training on preference pairs through the same loop: learning, resuming, plugins, plans and mistakes."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from run_helpers import (
    Config,
    assert_pieces_equal_the_whole,
    assert_same_weights,
    deterministic,
    train,
    write_pairs,
    write_rows,
)
from safetensors.torch import load_file, save_file

from spurline import load_config
from spurline.errors import CheckpointError, ConfigError, DataError
from spurline.run.build import build_data
from spurline.testing.samples import check_batch
from spurline.trackers.jsonl import read_json_lines
from spurline_models.local.backend import LocalBackend
from spurline_planning.plan import make_plan
from spurline_preference.reference import file_of


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


@pytest.fixture
def labels_config(preference_config: Config, tmp_path: Path) -> Config:
    """Pairs, and rows with a label of which one in three is bad, as one set of labelled answers."""
    rows = [{"prompt": f"{number}:", "completion": str(number % 7), "label": number % 3 > 0} for number in range(20)]
    data = {**preference_config["data"], "train": [preference_config["data"]["train"]]}
    data["train"].append(str(write_rows(tmp_path / "labelled.jsonl", rows)))
    return {**preference_config, "source": "labels", "data": data}


@pytest.mark.parametrize(
    ("source", "loss"),
    [
        ({"name": "preference"}, "dpo"),
        ({"name": "preference"}, "orpo"),
        ({"name": "labels", "reference": "precompute"}, "kto"),
    ],
    ids=["dpo", "orpo", "kto"],
)
def test_a_run_cut_in_pieces_equals_the_uninterrupted_run(
    request: pytest.FixtureRequest, tmp_path: Path, source: Config, loss: str
) -> None:
    config = request.getfixturevalue(f"{source['name']}_config")
    assert_pieces_equal_the_whole({**config, "source": source, "loss": loss}, tmp_path, [3])


def test_good_answers_become_likelier_than_the_reference_point_and_bad_ones_less_likely(labels_config: Config) -> None:
    run = train(labels_config, optimizer={"learning_rate": 3e-3}, steps=12)
    facts = json.loads((run.run_dir / "summary.json").read_text())["data"]["train"]
    assert (facts["samples"], facts["good"], facts["bad"]) == (80, 43, 37)
    assert "43 good and 37 bad answers" in facts["notes"]
    first, *_, last = run.lines
    # Before the first update the model is its own reference, and every loss is 1 - sigma(0).
    assert (first["loss"], first["preference/kl"]) == pytest.approx((0.5, 0.0), abs=1e-3)
    assert last["preference/chosen_reward"] > last["preference/rejected_reward"]
    assert last["eval/preference/accuracy"] > 0.6
    # Mismatched answers are scored, but not trained.
    assert last["loss_tokens"] < last["tokens"]


def test_a_batch_of_labelled_answers_has_answers_to_other_prompts_that_are_not_trained(labels_config: Config) -> None:
    with ExitStack() as stack:
        source: Any = build_data(load_config(labels_config), stack).source
        batch = source.build(1)
        samples = source._samples
        starts = samples.lay_out(np.arange(80), training=True)[1]
    check_batch(batch)
    # Every answer has a place of its own, and so has every mismatched answer.
    assert len({*starts.tolist()}) == len(starts) == 160
    assert int(starts.max()) < samples.num_places
    labels, ids = batch.tokens["labels"], batch.tokens["segment_ids"]
    counts = [0, 0]
    for row in range(batch.num_rows):
        for segment, number in enumerate(batch.segments["sample"][row].tolist(), start=1):
            here = ids[row] == segment
            (label,) = labels[row][here].unique().tolist()
            assert (label == 0) == (number == 1)
            assert float(batch.tokens["loss_weights"][row][here].sum()) == pytest.approx(1)
            counts[number] += 1
    assert counts[0] == counts[1] > 0


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics that do not depend on the clock."""
    return [{name: line[name] for name in line if name != "collation/hidden"} for line in deterministic(lines)]


@pytest.mark.parametrize("kind", ["preference", "labels"])
def test_stored_logprobs_of_the_reference_train_as_computed_ones_and_are_read_again(
    request: pytest.FixtureRequest, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = request.getfixturevalue(f"{kind}_config") | {"plugins": ["collation_fast"], "steps": 3}
    config["tokenization"] = {"cache_dir": str(tmp_path / "cache")}
    stored = {**config, "source": {"name": kind, "reference": "precompute"}}
    # Plans count no memory for a reference model whose values are stored, unless another one is loaded for them.
    given = {**stored, "model": {**config["model"], "frozen": {"reference": config["model"]}}}
    roles = [load_config(each).config.frozen_roles for each in (config, stored, given)]
    assert roles == [{"reference"}, set(), {"reference"}]
    computed = train(config, name="computed")
    first = train(stored, name="stored")
    assert numbers(first.lines) == numbers(computed.lines)
    assert_same_weights(first.run_dir, computed.run_dir)
    # Training and held-out answers each have a file.
    folder = tmp_path / "cache" / "reference_logprobs"
    files = sorted(folder.iterdir())
    assert len(files) == 2

    asked: list[str] = []
    logprobs = LocalBackend.logprobs

    def counting(self: LocalBackend, batch: Any, role: Any = "policy", **settings: Any) -> Any:
        asked.append(role)
        return logprobs(self, batch, role, **settings)

    monkeypatch.setattr(LocalBackend, "logprobs", counting)
    again = train(stored, name="again")
    assert numbers(again.lines) == numbers(first.lines)
    assert_same_weights(again.run_dir, first.run_dir)
    # KTO scores mismatched answers with the policy, in each step and in each batch of the evaluation.
    assert set(asked) == ({"policy"} if kind == "labels" else set())
    assert sorted(folder.iterdir()) == files
    train(stored, name="other", backend={**config["backend"], "precision": "bf16"}, steps=1)
    assert len([*folder.iterdir()]) == 4, "another precision has other values"


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


def test_a_resume_with_other_stored_values_of_the_reference_is_refused(
    preference_config: Config, tmp_path: Path
) -> None:
    config = {**preference_config, "evaluation": {}, "source": {"name": "preference", "reference": "precompute"}}
    del config["data"]["eval"]
    config["model"] = {"path": str(shutil.copytree(config["model"]["path"], tmp_path / "model"))}
    run = train(config, steps=2)
    # Without a token cache, the values are in the run directory.
    assert len([*(run.run_dir / "reference_logprobs").iterdir()]) == 1
    weights = tmp_path / "model" / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    other = train(config, name="other", steps=1)
    (stored,) = (other.run_dir / "reference_logprobs").iterdir()
    shutil.copy(stored, run.run_dir / "reference_logprobs")
    with pytest.raises(CheckpointError, match="the reference model, the tokens, or settings of the backend differ"):
        train(config, steps=4)


def test_stored_values_of_the_reference_fit_a_moved_model_and_another_version_of_the_library(
    preference_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name() -> str:
        context: Any = SimpleNamespace(config=load_config(preference_config).config)
        return file_of(context, "tokens").name

    before = name()
    model = shutil.copytree(preference_config["model"]["path"], tmp_path / "moved")
    preference_config["model"] = {**preference_config["model"], "path": str(model)}
    monkeypatch.setattr("transformers.configuration_utils.__version__", "99.0")
    assert name() == before
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    assert name() != before


def test_pairs_given_to_the_sft_source_are_recognised(preference_config: Config) -> None:
    with pytest.raises(DataError, match="Set `source: preference`"):
        train(preference_config, source="sft")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "cross_entropy"}, "would train on bad answers"),
        ({"source": "sft", "loss": "dpo"}, "Set source: preference"),
        ({"loss": {"name": "dpo", "label_smoothing": 0.1, "loss_type": "ipo"}}, "label_smoothing is 0.1"),
        ({"loss": {"name": "dpo", "length_normalized": True, "loss_type": "ipo"}}, "it always uses means"),
        ({"source": {"name": "preference", "reference": "precompute"}, "loss": "orpo"}, "reads no reference model"),
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
