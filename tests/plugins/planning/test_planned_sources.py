"""Which sources a plan can ask about the rollouts of a step."""

from __future__ import annotations

from typing import Any, ClassVar

from spurline import load_config
from spurline.config.run_config import RunConfig
from spurline.protocols.source import DecoratedSourceConfig, SourceConfig
from spurline_planning.protocols import planned


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
