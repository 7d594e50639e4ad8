"""What a user is told about a broken config of the plugins' components: where it is, and the nearest fix."""

from __future__ import annotations

import pytest
from config_files import MINIMAL, Failing

from spurline.errors import PluginError
from spurline.plugins.host import PluginHost, installed_commands
from spurline.plugins.official import DEFAULT_PLUGINS, OFFICIAL


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


@pytest.mark.parametrize("algorithm", ["ipo", "reinforce", "orpo", "simpo", "gspoo", "cpo"])
def test_an_algorithm_that_is_not_there_is_never_taken_for_another_one(failing: Failing, algorithm: str) -> None:
    (line,) = failing(MINIMAL + f"loss: {algorithm}\n")
    assert ("Did you mean" in line) == (algorithm == "gspoo"), line
    assert "Available: cispo, " in line


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("source: {name: rollouts, advantage: ppo, environment: {rewards: exact_match}}", "is a loss: set loss: ppo."),
        ("source: {name: rollouts, environment: exact_match}", "set source.environment.rewards: exact_match"),
        ("loss: sft", "'sft' is a source: set source: sft."),
        ("backend: {precision: fp16}", "it must be 'fp32', 'bf16' or 'fp64'."),
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


@pytest.mark.parametrize(("written", "meant"), [("fsdp", "fsdp_backend"), ("vllm", "async_rl")])
def test_a_part_of_a_plugin_in_the_place_of_its_name_is_told_the_plugin(written: str, meant: str) -> None:
    with pytest.raises(PluginError, match=f"Did you mean '{meant}'"):
        PluginHost.load([written])


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
        own = {f"command/{command.name}" for command in commands if command.distribution == installed.distribution}
        assert found | sections | own == set(table), plugin
        assert len(table) == len(set(table)), plugin
        known |= found


REQUIRED = {"agents": ("async_rl",)}
"""Plugins that must be listed with a plugin."""


def test_problem_in_a_named_reward_has_its_key_path(failing: Failing) -> None:
    (line,) = failing(
        MINIMAL + "evaluation:\n  generate:\n    rewards:\n      ok: {name: exact_match, ignore_cas: 1}\n"
    )
    assert line.startswith("run.yaml:7: evaluation.generate.rewards.ok.ignore_cas is not a setting of 'exact_match'.")


def test_every_installed_command_says_what_it_does() -> None:
    summaries = {name: entry.summary() for name, entry in installed_commands().items()}
    assert summaries
    assert not [name for name, line in summaries.items() if line.startswith(("(of ", "of ")) or not line.endswith(".")]
