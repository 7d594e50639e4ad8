"""The sections `reduction` and `critic`: their short forms, their checks, and what `spurline plan` says of them."""

from __future__ import annotations

from typing import Any

import pytest

from spurline import load_config
from spurline.errors import ConfigError

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}


def rollouts(**settings: Any) -> dict[str, Any]:
    environment = {"name": "single_turn", "rewards": "exact_match"}
    source = {"name": "rollouts", "environment": environment, "prompts_per_step": 6, "advantage": "gae", **settings}
    return {**BASE, "source": source}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("prompt_mean", {"name": "prompt_mean", "length": None}),
        ({"name": "fixed_norm", "length": 512}, {"name": "fixed_norm", "length": 512}),
        ({}, {"name": "token_mean", "length": None}),
    ],
)
def test_a_reduction_is_a_name_or_a_section(written: Any, expected: dict[str, Any]) -> None:
    resolved = load_config({**BASE, "reduction": written}).resolved()
    assert resolved["reduction"] == expected
    assert load_config(resolved).resolved() == resolved


def test_a_critic_chooses_its_optimizer_as_the_policy_does() -> None:
    def chosen(written: Any) -> dict[str, Any]:
        return load_config({**rollouts(), "critic": {"optimizer": written}}).resolved()["critic"]["optimizer"]

    assert chosen("muon")["name"] == "muon"
    assert chosen({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9})["momentum"] == 0.9
    assert chosen({"learning_rate": 3e-5})["name"] == "adamw"
    with pytest.raises(ConfigError, match=r"critic\.optimizer is 'muno', but no optimizer .*muon"):
        chosen("muno")


def test_a_critic_is_required_by_gae_and_refused_where_nothing_reads_it() -> None:
    with pytest.raises(ConfigError, match=r"source\.advantage\.name is gae, .*Add a section `critic: \{\}`"):
        load_config(rollouts())
    with pytest.raises(ConfigError, match=r"critic has no effect: the advantage 'grpo'"):
        load_config({**rollouts(advantage="grpo"), "critic": {}})
    with pytest.raises(ConfigError, match=r"critic has no effect: the source 'sft'"):
        load_config({**BASE, "critic": {}})
