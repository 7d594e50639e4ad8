"""Test the plugin's own behaviour, which no contract of Spurline covers."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from spurline import load_config
from spurline.errors import ConfigError
from spurline.plugins import ComponentRegistrar, Plugin, hookimpl
from spurline.plugins.host import InstalledPlugin
from spurline.protocols.loss import TokenLossInputs
from spurline_plugin_template.config import FocalConfig, LionConfig, TemplateConfig
from spurline_plugin_template.focal_loss import FocalLoss
from spurline_plugin_template.lion import Lion
from spurline_plugin_template.percentiles import percentile
from spurline_plugin_template.step_times import FILE_NAME, StepTimes
from spurline_plugin_template.typical_time import TypicalTimeConfig

# The tests name the plugin's module, so that they also run without an installed plugin. A user's config needs no such
# argument.
AVAILABLE = {
    "plugin_template": InstalledPlugin("plugin_template", "spurline_plugin_template.plugin", "under-test", "0")
}
CONFIG = {"plugins": ["plugin_template"], "model": {"path": "any"}, "data": {"train": "any.jsonl"}, "steps": 100}


def inputs(logprobs: torch.Tensor) -> TokenLossInputs:
    return TokenLossInputs(logprobs, torch.zeros(len(logprobs), dtype=torch.int64), 1, {})


def test_gamma_zero_is_cross_entropy() -> None:
    logprobs = torch.tensor([-3.0, -0.5, -1e-4])
    torch.testing.assert_close(FocalLoss(FocalConfig(gamma=0)).token_loss(inputs(logprobs)), -logprobs)


def test_loss_is_the_papers_formula() -> None:
    probability = torch.tensor([0.9, 0.5, 0.01], dtype=torch.float64)
    expected = -((1 - probability) ** 2) * probability.log()
    torch.testing.assert_close(FocalLoss(FocalConfig(gamma=2)).token_loss(inputs(probability.log())), expected)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 5.0])
def test_gradient_is_finite_for_a_token_of_probability_one(gamma: float) -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    FocalLoss(FocalConfig(gamma=gamma)).token_loss(inputs(logprobs)).sum().backward()
    assert logprobs.grad is not None
    assert bool(torch.isfinite(logprobs.grad).all())


def test_lion_makes_the_papers_steps() -> None:
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    lion = Lion(LionConfig(learning_rate=0.1, weight_decay=0.5, betas=(0.9, 0.99)), {"weight": weight})
    for gradient in ([[1.0, -3.0]], [[-0.02, 0.4]]):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        lion.step()
    # The first step has the sign of the gradient. The second has the sign of 0.9 x momentum + 0.1 x gradient, with
    # momenta 0.01 and -0.03.
    first = [1.0 - 0.1 * (1 + 0.5 * 1.0), -2.0 - 0.1 * (-1 + 0.5 * -2.0)]
    signs = [1, 1]  # 0.9 * 0.01 - 0.1 * 0.02 > 0, 0.9 * -0.03 + 0.1 * 0.4 > 0
    expected = [value - 0.1 * (sign + 0.5 * value) for value, sign in zip(first, signs, strict=True)]
    torch.testing.assert_close(weight.detach(), torch.tensor([expected], dtype=torch.float64))


def test_config_takes_the_optimizer_with_what_all_optimizers_have() -> None:
    groups = [{"match": "*embed*", "learning_rate_scale": 0.5}]
    settings = {**CONFIG, "optimizer": {"name": "lion", "learning_rate": 3e-6, "groups": groups}}
    chosen = load_config(settings, available=AVAILABLE).config.optimizer
    assert (chosen.name, chosen.learning_rate, chosen.groups[0].match) == ("lion", 3e-6, "*embed*")


def test_config_takes_the_loss_and_the_section() -> None:
    settings = {**CONFIG, "loss": {"name": "focal", "gamma": 1.5}, "plugin_template": {"percentiles": [50]}}
    config = load_config(settings, available=AVAILABLE).config
    assert config.model_dump()["loss"] == {"name": "focal", "gamma": 1.5}
    assert config.model_dump()["plugin_template"]["percentiles"] == (50,)


def test_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plugin_template\.warm_up_steps is 100, but the run has only 100 steps"):
        load_config({**CONFIG, "plugin_template": {"warm_up_steps": 100}}, available=AVAILABLE)


def step_times(run_dir: Path, told: dict[int, float] | None = None, **settings: Any) -> StepTimes:
    """Return the hooks of a run in `run_dir`. The plugin's own hook adds slow steps to `told`."""
    host = load_config({**CONFIG, "plugin_template": settings}, available=AVAILABLE).host

    class Listener:
        @hookimpl
        def on_slow_step(self, step: int, seconds: float) -> None:
            (told if told is not None else {})[step] = seconds

    host.attach(Listener(), "listener")
    config = TemplateConfig(**settings)
    return StepTimes(config, run_dir, host.registry.create("typical_time", config.typical), host.hooks)


def test_slow_step_is_warned_about_told_and_written_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: dict[int, float] = {}
    times = step_times(tmp_path, told, warm_up_steps=1, warn_factor=2)
    with caplog.at_level(logging.WARNING):
        for step, seconds in enumerate([9.0, 1.0, 1.0, 5.0, 1.0], start=1):
            times.on_step_end(step, {"time/step": seconds})
    times.on_run_end()
    written = json.loads((tmp_path / FILE_NAME).read_text())
    assert caplog.messages == ["step 4 took 5 s, 5.0 times the typical time"]
    assert told == {4: 5.0}
    assert written["steps"] == 4
    assert written["slow_steps_s"] == {"4": 5.0}
    assert written["percentiles_s"]["50"] == 1.0


def test_another_plugin_listed_earlier_offers_a_component_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class FastestConfig(TypicalTimeConfig):
        """The fastest step so far."""

        name: str = "fastest"

    @hookimpl
    def register_components(registry: ComponentRegistrar) -> None:
        registry.add(FastestConfig, "builtins:object")

    module = ModuleType("spurline_fastest")
    vars(module).update(PLUGIN=Plugin("fastest", api=2), register_components=register_components)
    monkeypatch.setitem(sys.modules, "spurline_fastest", module)
    available = AVAILABLE | {"fastest": InstalledPlugin("fastest", "spurline_fastest", "spurline-fastest", "0")}
    settings = {"plugins": ["fastest", "plugin_template"], "plugin_template": {"typical": "fastest"}}
    loaded = load_config({**CONFIG, **settings}, available=available)
    assert loaded.config.model_dump()["plugin_template"]["typical"] == {"name": "fastest"}


def test_evaluation_does_not_make_a_step_slow(tmp_path: Path) -> None:
    times = step_times(tmp_path)
    for step in range(1, 6):
        times.on_step_end(step, {"time/step": 1.0 if step < 5 else 10.0, "time/evaluate": 0.0 if step < 5 else 9.0})
    assert times.summary()["slow_steps_s"] == {}


def test_run_that_ends_before_the_warm_up_still_writes_its_file(tmp_path: Path) -> None:
    step_times(tmp_path).on_run_end()
    assert json.loads((tmp_path / FILE_NAME).read_text())["percentiles_s"] == {}


def test_percentile_interpolates() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([7.0], 99) == 7.0
