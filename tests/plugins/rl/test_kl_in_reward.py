"""KL in the reward is refused where an advantage would blow it up, and accepted elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from spurline import load_config
from spurline.errors import ConfigError


def load(advantage: Any, **source: Any) -> object:
    source = {"name": "rollouts", "samples_per_prompt": 2, "advantage": advantage, **source}
    source["environment"] = {"name": "single_turn", "rewards": "exact_match"}
    config: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1, "source": source}
    if advantage == "gae":
        config["critic"] = {}
    return load_config(config)


CHARGE = {"coefficient": 0.01}


@pytest.mark.parametrize("advantage", ["grpo", "maxrl"])
def test_advantages_in_units_of_the_group_are_refused_with_the_fix(advantage: str) -> None:
    assert load(advantage)
    with pytest.raises(ConfigError) as error:
        load(advantage, kl_in_reward=CHARGE)
    assert f"source.advantage.name is {advantage}, which divides by the spread or the mean" in str(error.value)
    for fix in ("loss.kl.coefficient", "normalize_std: false", "dr_grpo", "rloo", "gae"):
        assert fix in str(error.value)


@pytest.mark.parametrize(
    "advantage", [{"name": "grpo", "normalize_std": False}, "dr_grpo", "rloo", "gae", "reinforce_pp"]
)
def test_other_advantages_are_accepted(advantage: Any) -> None:
    assert load(advantage, kl_in_reward=CHARGE)
