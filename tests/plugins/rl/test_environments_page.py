"""What docs/environments.md shows works as it is shown."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
from rl_attempts import core_registry, make_policy, make_task, run, says
from ruamel.yaml import YAML
from transformers import PreTrainedTokenizerBase

from spurline.config.assembly import assemble
from spurline.config.run_config import DataConfig
from spurline.config.section import Component, ComponentConfig, Section
from spurline.plugins.host import InstalledPlugin, PluginHost
from spurline.protocols.dataset import DatasetConfig
from spurline_rl.evaluation_configs import HeldOutConfig
from spurline_rl.protocols.reward import Answer
from spurline_rl.testing import EnvironmentContract
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_text.testing.inputs import tiny_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text("utf-8")
FILES: dict[str, str] = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.S))
SETTINGS: list[str] = re.findall(r"```yaml\n(source:.*?)```", PAGE, re.S)


class SourceAsShown(Section):
    """The settings of a source that the page speaks of."""

    name: str
    """Which source."""
    environment: Annotated[ComponentConfig, Component("environment")]
    """The environment."""
    reward_weights: dict[str, float] = {}
    """Weights."""
    held_out: HeldOutConfig = HeldOutConfig()
    """What counts as a success."""


DATA = DataConfig(train=(DatasetConfig(name="rows"),), on_ignored="warn")


def read_source(settings: dict[str, Any]) -> Any:
    """The settings as a config file's would be read, with core's components to choose from."""
    section: Any = assemble(core_registry(), {"shown": SourceAsShown}).model_fields["shown"].annotation
    return section.model_validate(settings)


def build(source: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    registry = core_registry()
    return registry.create("environment", source.environment, registry=registry, tokenizer=tokenizer, data=DATA)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The page's Python files, written to a folder and imported from there."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [name.removesuffix(".py") for name in FILES]
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.processes
@pytest.mark.parametrize("text", SETTINGS)
def test_the_settings_are_valid_and_the_environments_can_be_built(text: str, modules: dict[str, ModuleType]) -> None:
    pytest.importorskip("math_verify")
    source = read_source(YAML(typ="safe", pure=True).load(text)["source"])
    assert set(source.reward_weights) <= set(source.environment.rewards)
    build(source, tiny_tokenizer()).close()


def test_the_functions_do_what_they_are_for(modules: dict[str, ModuleType]) -> None:
    answer = Answer("who", "as Homer says", None, {"source": "Homer"})
    rewards, tools = modules["my_rewards"], modules["my_tools"]
    assert (rewards.brief(answer), rewards.names_a_source(answer), tools.population("Oslo")) == (-3, 1.0, 709037)


CONTRACT = [name for name in vars(EnvironmentContract) if name.startswith("test_")]


@pytest.mark.parametrize("test", CONTRACT)
def test_an_environment_of_thirty_lines_passes_the_contract(test: str, modules: dict[str, ModuleType]) -> None:
    code = [line for line in FILES["guess.py"].splitlines() if line.strip()]
    assert len(code) <= 32
    getattr(modules["test_guess"].TestGuess(), test)()


def test_the_environment_of_the_page_needs_no_plugin(modules: dict[str, ModuleType]) -> None:
    for given in (f"{modules['guess'].__file__}:Guess", modules["guess"].Guess):
        settings = {"name": "custom", "path": given, "max_turns": 2}
        environment = build(read_source({"name": "rollouts", "environment": settings}), tiny_tokenizer())
        engine = ScriptedEngine(says(tiny_tokenizer(), "50", "6"))
        trajectory = run(environment.run(make_task({"number": 7}), make_policy(engine, make_task({"number": 7}))))
        assert (trajectory.rewards, len(trajectory.turns)) == ({"right": 0.0}, 2)


def test_the_plugin_of_the_page_registers_an_environment_that_plays(modules: dict[str, ModuleType]) -> None:
    plugin = InstalledPlugin("guess", "guess_plugin", "guess", "0")
    registry = PluginHost.load(["guess"], {"guess": plugin}).registry
    config = registry.get("environment", "guess").config(max_turns=3)
    environment = registry.create("environment", config, registry=registry, tokenizer=tiny_tokenizer(), data=DATA)
    engine = ScriptedEngine(says(tiny_tokenizer(), "50", "what", "7"))
    task = make_task({"number": 7})
    trajectory = run(environment.run(task, make_policy(engine, task)))
    assert trajectory.rewards == {"right": 1.0}
    assert [turn.rewards[-1] for turn in trajectory.turns if turn.rewards is not None] == [0.0, -1.0, 0.0]
    said = [message["content"] for message in trajectory.info["messages"]][1:]
    assert said == ["50", "Lower.", "what", "That is no number.", "7"]
