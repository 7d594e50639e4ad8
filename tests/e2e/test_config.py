"""Configs of the plugins' components: the examples, errors with the nearest fix, and what plugins of others declare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_files import MINIMAL, Failing, load
from fake_plugins import FakePlugins
from pydantic import Field

from spurline import load_config
from spurline.config.document import read_document
from spurline.config.loading import config_model
from spurline.errors import ConfigError, PluginError
from spurline.plugins.host import PluginHost, distribution_of, installed_commands
from spurline.plugins.official import DEFAULT_PLUGINS, OFFICIAL
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.backend import BackendConfig, BackendFacts
from spurline.protocols.collator import CollatorConfig
from spurline.protocols.loss import LossConfig
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.protocols.source import SourceConfig, SourceFacts
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.rewards.function import load_function

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    """A validator of the JSON schema. Checking the schema itself takes longer than all examples."""
    validators = pytest.importorskip("jsonschema.validators")
    recipes = ["agents", "curricula", "distillation", "evals", "objectives", "reward_models"]
    host = PluginHost.load(["collation_fast", "async_rl", "fsdp_backend", "megatron_backend", *recipes])
    schema = config_model(host).model_json_schema()
    kind = validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads_and_fits_the_json_schema(example: Path, validator: Any) -> None:
    assert load_config(example).config.run_dir == Path("runs") / example.stem
    assert [error.message for error in validator.iter_errors(read_document(example).values)] == []


@pytest.mark.parametrize(
    ("advantage", "beside"),
    [
        ("grpo", "loss: ppo"),
        ("dr_grpo", "loss: ppo and reduction: {name: fixed_norm, length: N}"),
        ("rloo", "loss: policy_gradient"),
        ("gae", "loss: ppo and critic: {}"),
    ],
)
@pytest.mark.parametrize("setting", ["loss", "source"])
def test_an_advantage_where_a_loss_belongs_is_told_its_place_and_the_loss_that_goes_with_it(
    failing: Failing, setting: str, advantage: str, beside: str
) -> None:
    (line,) = failing(MINIMAL + f"{setting}: {advantage}\n")
    place = f"set source.advantage: {advantage}, and {beside}. Available: "
    assert f"{setting} is '{advantage}', but no {setting} has that name. '{advantage}' is an advantage: {place}" in line
    assert "Did you mean" not in line


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("source: {name: rollouts, advantage: ppo, environment: {rewards: exact_match}}", "is a loss: set loss: ppo."),
        ("source: {name: rollouts, environment: exact_match}", "set source.environment.rewards: exact_match"),
        ("loss: sft", "'sft' is a source: set source: sft."),
        ("backend: {precision: fp16}", "it must be 'auto', 'fp32', 'bf16' or 'fp64'."),
        ("backend: {ranks: 2}", "`backend: {name: fsdp, ranks: N}`"),
        ("backend: {tensor: 2}", "`plugins: [megatron_backend]`"),
        ("plugins: [fsdp_backend]\nbackend: {name: fsdp, tensor: 2}", "`plugins: [megatron_backend]`"),
    ],
)
def test_a_name_or_a_setting_of_another_component_is_told_its_place(failing: Failing, text: str, fix: str) -> None:
    assert fix in "".join(failing(MINIMAL + text + "\n"))


@pytest.mark.parametrize(
    ("text", "plugin"),
    [("backend: fsdp", "fsdp_backend"), ("prefetch: async", "collation_fast"), ("source: async_rollouts", "async_rl")],
)
def test_a_component_of_a_plugin_that_is_not_listed_names_the_plugin(failing: Failing, text: str, plugin: str) -> None:
    (line,) = failing(MINIMAL + text + "\n")
    assert f"which the plugin '{plugin}' has: " in line
    assert f"list it under plugins: [{plugin}]." in line


def test_what_the_plugins_of_this_project_have_is_as_the_table_says() -> None:
    commands = installed_commands().values()
    core = PluginHost.load([f"-{name}" for name in DEFAULT_PLUGINS])
    known = {f"{entry.kind}/{entry.name}" for entry in core.registry.entries()}
    for plugin, table in OFFICIAL.items():
        host = PluginHost.load([] if plugin in DEFAULT_PLUGINS else [*REQUIRED.get(plugin, ()), plugin])
        installed = host.plugins[plugin]
        assert installed.distribution == f"spurline-{plugin.replace('_', '-')}"
        found = {f"{entry.kind}/{entry.name}" for entry in host.registry.entries(plugin)} - known
        sections = {f"section/{name}" for name, section in host.registry.sections.items() if section.plugin == plugin}
        own = {f"command/{each.name}" for each in commands if distribution_of(each)[0] == installed.distribution}
        assert found | sections | own == set(table), plugin
        assert len(table) == len(set(table)), plugin
        known |= found


REQUIRED = {"agents": ("async_rl",)}
"""Plugins that must be listed with a plugin."""


def reward(project: Path, path: str) -> str:
    """Return the path of a reward function as a config beside it resolves it."""
    settings = {"data.eval": "org/rows", "evaluation.generate": f'{{rewards: {{x: "{path}"}}}}'}
    loaded = load(project, **settings)
    return str(loaded.resolved()["evaluation"]["generate"]["rewards"]["x"]["path"])


@pytest.mark.parametrize("folder", ["configs", "work"])
@pytest.mark.parametrize("written", ["test_paths_{0}:f", "test_paths_{0}.py:f", "./test_paths_{0}.py:f"])
def test_reward_functions_beside_the_config_or_here_are_found_by_module_and_by_file(
    project: Path, folder: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / folder / f"test_paths_{folder}.py").write_text(
        f"def f(answer):\n    return {folder!r}\n", encoding="utf-8"
    )
    path = reward(project, written.format(folder))
    assert path.startswith(f"{project}/{folder}/test_paths_{folder}")
    monkeypatch.chdir(project / "home")
    assert load_function(path, "reward function")(None) == folder


def test_modules_of_a_package_beside_the_config_import_each_other(project: Path) -> None:
    package = project / "configs" / "test_paths_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("VALUE = 7\n", encoding="utf-8")
    (package / "rewards.py").write_text("from .parts import VALUE\n\ndef f(answer):\n    return VALUE\n", "utf-8")
    assert load_function(reward(project, "test_paths_package.rewards:f"), "reward function")(None) == 7


def test_a_reward_module_of_an_installed_name_is_an_error(project: Path) -> None:
    (project / "configs" / "colorsys.py").write_text("def f(answer):\n    return 3\n", encoding="utf-8")
    with pytest.raises(PluginError, match=r"'colorsys' is already .*configs/colorsys\.py:rgb"):
        load_function(reward(project, "colorsys:rgb_to_hls"), "reward function")
    path = str(project / "configs" / "colorsys.py")
    for written in (f"{path}:f", reward(project, "colorsys.py:f")):
        assert load_function(written, "reward function")(None) == 3


BASE = {"plugins": ["own"], "model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}
ROLLOUTS = {"name": "rollouts", "environment": {"rewards": "exact_match"}}


class OwnCollatorConfig(CollatorConfig):
    name: str = "own_rows"
    tokens: int = 3000

    @property
    def row_capacity(self) -> int:
        return self.tokens


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


OWN = (OwnCollatorConfig, OwnMiniBatchesConfig, OwnBackendConfig, OwnEnvironmentConfig, OwnLossConfig, OwnPromptsConfig)


def register(registry: ComponentRegistrar) -> None:
    for config in OWN:
        registry.add(config, f"{__name__}:Never")


@pytest.fixture
def with_own(plugins: FakePlugins) -> FakePlugins:
    plugins.add("own", register=register)
    return plugins


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": ROLLOUTS, "collator": "own_rows"}, "the collator is own_rows. Set collator: rollouts"),
        (
            {"source": "preference", "collator": "own_rows", "data": {"train": "rows.jsonl", "max_length": 2000}},
            "4000 tokens, twice data.max_length, but collator.max_tokens is 3000",
        ),
        ({"source": "preference", "loss": "own_loss"}, "own_loss would train on bad answers as on good ones"),
        (
            {"source": "preference", "backend": {"name": "own_backend", "noise": 0.1}},
            "source.name is preference, which compares logprobs .* but backend.noise is 0.1",
        ),
        (
            {"source": {"name": "rollouts", "environment": "own_environment", "reward_weights": {"sped": 1.0}}},
            "reward_weights.sped is 'sped', which is not a reward term. Did you mean 'speed'",
        ),
        (
            {"source": {**ROLLOUTS, "advantage_scope": "minibatch"}, "minibatches": "own_minibatches"},
            "advantage_scope is minibatch, but minibatches: own_minibatches sets no number of prompts",
        ),
        (
            {"source": "own_prompts", "minibatches": {"name": "by_prompt", "prompts_per_minibatch": 4}},
            "does not divide source.prompts_per_step: 6",
        ),
    ],
)
def test_what_does_not_fit_is_refused_also_of_a_plugin_of_others(
    with_own: FakePlugins, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**BASE, **settings}, available=with_own.available)
