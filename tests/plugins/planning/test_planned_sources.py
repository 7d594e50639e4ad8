"""Which sources a plan can ask about the rollouts of a step, and which components about their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from fake_plugins import FakePlugins

from spurline import load_config
from spurline.config.run_config import RunConfig
from spurline.plugins.host import installed_plugins
from spurline.protocols.source import DecoratedSourceConfig, SourceConfig
from spurline_planning.fit import Load, estimate_load, memory_lines
from spurline_planning.protocols import planned
from spurline_rl.protocols.reward import RewardConfig


def config(source: Any) -> RunConfig:
    settings = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}
    return load_config({**settings, "source": source}).config


def rollouts() -> SourceConfig:
    return config({"name": "rollouts", "environment": {"rewards": "exact_match"}}).source


class OtherName(DecoratedSourceConfig):
    decorates: ClassVar[str | None] = "inner"

    name: str = "other_name"
    inner: SourceConfig


def test_a_source_of_rollouts_can_be_planned_and_one_of_samples_cannot() -> None:
    source = rollouts()
    assert planned(source) is source
    assert planned(config("sft").source) is None


def test_a_decorated_source_is_planned_as_what_it_decorates_however_deep() -> None:
    source = rollouts()
    once = DecoratedSourceConfig(name="once", of=source)
    assert planned(DecoratedSourceConfig(name="twice", of=once)) is source
    assert planned(OtherName(of=config("sft").source, inner=once)) is source
    assert planned(DecoratedSourceConfig(name="once", of=config("sft").source)) is None


class JudgeConfig(RewardConfig):
    name: str = "judge"

    def held_memory(self, run: RunConfig) -> dict[str, int]:
        return {"weights of the judge": 3 << 30}


def test_a_reward_with_a_model_of_its_own_counts_in_the_memory_of_a_plan(spurline_tiny_model: Path) -> None:
    def totals(reward: str) -> tuple[list[str], int]:
        settings = {"model": {"path": str(spurline_tiny_model)}, "data": {"train": "rows.jsonl"}, "steps": 1}
        source = {"name": "rollouts", "environment": {"rewards": {"right": reward}}}
        with FakePlugins() as plugins:
            available = plugins.add("mine", register=lambda registry: registry.add(JudgeConfig, "none:Judge"))
            run = load_config(
                {**settings, "source": source, "plugins": ["mine"]}, available=installed | available
            ).config
        estimate = estimate_load(run, Load(8, 64))
        assert estimate is not None
        return memory_lines(run, Load(8, 64), 1 << 40), estimate.peak

    installed = installed_plugins()
    lines, with_judge = totals("judge")
    assert "weights of the judge (source.environment.rewards.right): 3,072 MiB" in lines
    assert with_judge - totals("exact_match")[1] == 3 << 30
