"""`--set key.path=value` for settings of the plugins' components."""

from __future__ import annotations

from config_files import message, resolved


def test_nested_component_in_a_mapping_keeps_its_name() -> None:
    evaluation = {"generate": {"rewards": {"score": "exact_match"}}}
    data = {"train": "a.jsonl", "eval": "b.jsonl"}
    got = resolved("evaluation.generate.rewards.score.ignore_case=true", evaluation=evaluation, data=data)
    assert got["evaluation"]["generate"]["rewards"]["score"] == {"name": "exact_match", "ignore_case": True}


def test_unknown_key_in_an_override_gets_a_near_miss() -> None:
    assert "optimizer.learnig_rate is not a setting of 'adamw'. Did you mean 'learning_rate'?" in message(
        "optimizer.learnig_rate=1"
    )
