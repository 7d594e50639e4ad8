"""Checks between sections know what a plugin's own components can do, from what their configs declare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_plugins import FakePlugins
from pydantic import Field

from spurline import load_config
from spurline.errors import ConfigError
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.backend import BackendConfig, BackendFacts
from spurline.protocols.collator import CollatorConfig
from spurline.protocols.loss import LossConfig
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.protocols.source import SourceConfig, SourceFacts
from spurline_rl.protocols.environment import EnvironmentConfig

BASE = {"plugins": ["own"], "model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}
ROLLOUTS = {"name": "rollouts", "environment": {"rewards": "exact_match"}}


class OwnCollatorConfig(CollatorConfig):
    name: str = "own_rows"
    tokens: int = 3000

    @property
    def row_capacity(self) -> int:
        return self.tokens


class OwnTurnsConfig(CollatorConfig):
    one_turn_per_row = True
    name: str = "own_turns"


class OwnMiniBatchesConfig(MiniBatchesConfig):
    name: str = "own_minibatches"


class OwnBackendConfig(BackendConfig):
    name: str = "own_backend"
    noise: float = Field(default=0.0)

    @property
    def facts(self) -> BackendFacts:
        return BackendFacts(dropout_rates={"noise": self.noise})


class OwnEnvironmentConfig(EnvironmentConfig):
    name: str = "own_environment"

    @property
    def reward_terms(self) -> tuple[str, ...]:
        return ("speed",)


class OwnLossConfig(LossConfig):
    name: str = "own_loss"


class OwnPromptsConfig(SourceConfig):
    name: str = "own_prompts"

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, num_prompts=6, without_critic=None)


OWN = (
    OwnCollatorConfig,
    OwnTurnsConfig,
    OwnMiniBatchesConfig,
    OwnBackendConfig,
    OwnEnvironmentConfig,
    OwnLossConfig,
    OwnPromptsConfig,
)


def register(registry: ComponentRegistrar) -> None:
    for config in OWN:
        registry.add(config, f"{__name__}:Never")


@pytest.fixture
def plugins() -> Iterator[FakePlugins]:
    with FakePlugins() as plugins:
        plugins.add("own", register=register)
        yield plugins


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": ROLLOUTS, "collator": "own_rows"}, "the collator is own_rows. Set collator: rollouts"),
        (
            {"source": "preference", "collator": "own_rows", "data": {"train": "rows.jsonl", "max_length": 2000}},
            "twice data.max_length: 4000 tokens, but collator.max_tokens is 3000",
        ),
        ({"source": "preference", "loss": "own_loss"}, "own_loss would train on rejected answers as on chosen ones"),
        (
            {"source": "preference", "backend": {"name": "own_backend", "noise": 0.1}},
            "source.name is preference, which compares logprobs .* but backend.noise is 0.1",
        ),
        (
            {"source": {"name": "rollouts", "environment": "own_environment", "reward_weights": {"sped": 1.0}}},
            "reward_weights.sped names no reward term. Did you mean 'speed'",
        ),
        (
            {"source": {**ROLLOUTS, "advantage_scope": "minibatch"}, "minibatches": "own_minibatches"},
            "advantage_scope is minibatch, but minibatches: own_minibatches do not say how many prompts",
        ),
        (
            {"source": "own_prompts", "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 4}},
            "does not divide source.prompts_per_step: 6",
        ),
    ],
)
def test_what_does_not_fit_is_refused_whoever_wrote_it(
    plugins: FakePlugins, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**BASE, **settings}, available=plugins.available)


@pytest.mark.parametrize(
    "settings",
    [
        {"source": ROLLOUTS, "collator": "own_turns"},
        {"source": ROLLOUTS, "minibatches": "own_minibatches"},
        {"source": {**ROLLOUTS, "advantage_scope": "minibatch"}, "minibatches": "whole"},
        {"source": "preference", "backend": "own_backend"},
        {"source": {"name": "rollouts", "environment": "own_environment", "reward_weights": {"speed": 1.0}}},
        {"source": "own_prompts", "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 3}, "critic": {}},
    ],
)
def test_what_fits_is_taken_whoever_wrote_it(plugins: FakePlugins, settings: dict[str, Any]) -> None:
    config = load_config({**BASE, **settings}, available=plugins.available).config
    named = {section: value if isinstance(value, str) else value.get("name") for section, value in settings.items()}
    assert {section: getattr(getattr(config, section), "name", None) for section in settings} == named
