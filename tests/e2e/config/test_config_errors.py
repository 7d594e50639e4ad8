"""What a user is told about a broken config of the plugins' components: where it is, and the nearest fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from config_files import MINIMAL, Failing

from spurline.config.loading import config_model
from spurline.errors import PluginError
from spurline.plugins.host import PluginHost, installed_commands
from spurline.plugins.official import DEFAULT_PLUGINS, OFFICIAL
from spurline_planning.other_names import NAMES, OTHER_NAMES


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
    ("text", "told"),
    [
        (
            "source: {name: rollouts, advantage: ppo, environment: {rewards: exact_match}}",
            "'ppo' is a loss: set loss: ppo.",
        ),
        (
            "source: {name: rollouts, environment: exact_match}",
            "is a reward: set source.environment.rewards: exact_match",
        ),
        ("loss: sft", "'sft' is a source: set source: sft."),
    ],
)
def test_a_name_of_another_kind_is_told_as_such(failing: Failing, text: str, told: str) -> None:
    assert told in "".join(failing(MINIMAL + text + "\n"))


@pytest.mark.parametrize("algorithm", ["ipo", "dppo", "reinforce", "orpo", "simpo", "gspoo", "cpo"])
def test_an_algorithm_that_is_not_there_is_never_taken_for_another_one(failing: Failing, algorithm: str) -> None:
    (line,) = failing(MINIMAL + f"loss: {algorithm}\n")
    assert ("Did you mean" in line) == (algorithm == "gspoo"), line
    assert "Available: cispo, " in line


def test_a_precision_that_is_not_there_is_never_taken_for_another_one(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "backend: {precision: fp16}\n")
    assert line == "run.yaml:4: backend.precision is 'fp16'; it must be 'fp32', 'bf16' or 'fp64'."


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("num_generations: 8", "There is source.samples_per_prompt."),
        ("source: {name: rollouts, num_generations: 8}", "Did you mean 'samples_per_prompt'?"),
        ("lora_r: 8", "There is backend.lora.rank."),
        ("backend: {lora: {r: 8}}", "Did you mean 'rank'?"),
        # `steps`, the nearest word, is another thing.
        ("eval_steps: 8", "There is evaluation.every_steps."),
        ("checkpoint: {save_total_limit: 8}", "Did you mean 'keep_last'?"),
        ("packing: true", "Write `collator: packed`."),
        ("bf16: true", "There is `backend.precision: bf16`."),
        ("reward: my.py:is_right", "There is source.environment.rewards."),
        # Theirs is of one device.
        ("per_device_train_batch_size: 4", "is not a setting. batch_size is the samples of an optimizer step"),
        ("gradient_accumulation_steps: 4", "is not a setting. It is not needed: batch_size is the samples of"),
    ],
)
def test_what_other_trainers_call_a_setting_is_told_as_it_is_called_here(failing: Failing, text: str, fix: str) -> None:
    assert fix in "".join(failing(MINIMAL + text + "\n"))


def test_every_setting_that_stands_for_one_of_another_trainer_exists() -> None:
    document = config_model(PluginHost.load(list(OFFICIAL))).model_json_schema()
    missing = {name: meant for name, meant in OTHER_NAMES.items() if not _has(document, document, NAMES.path_of(name))}
    assert not missing


def _has(document: Mapping[str, Any], schema: Any, key: str) -> bool:
    """Whether the JSON schema has this key path in one of its choices."""
    if not isinstance(schema, Mapping):
        return False
    if "$ref" in schema:
        return _has(document, document["$defs"][schema["$ref"].rpartition("/")[2]], key)
    first, _, rest = key.partition(".")
    here = schema.get("properties", {}).get(first)
    if here is not None and (not rest or _has(document, here, rest)):
        return True
    choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")]
    return any(_has(document, choice, key) for choice in choices)


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
"""What must be listed with a plugin."""


REWARDS = "environment: {rewards: exact_match}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"source: {{name: rollouts, {REWARDS}}}\nloss: dapo", "DAPO is `loss: {name: ppo, clip_high: 0.28}` with"),
        ("source: preference\nloss: ipo", "IPO is `loss: {name: dpo, loss_type: ipo}`. Available"),
        (
            f"source: {{name: rollouts, {REWARDS}}}\nloss: {{name: ppo, beta: 0.1}}",
            "KL penalty is kl: {coefficient: ...}",
        ),
    ],
)
def test_what_is_half_right_is_told_whole(failing: Failing, text: str, told: str) -> None:
    assert told in "".join(failing(MINIMAL + text + "\n"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("backend: deepspeed", "`plugins: [fsdp_backend]` with `backend: fsdp`"),
        ("backend: DDP", "`backend: {name: fsdp, ranks: N}`"),
        ("backend: cuda", "`backend: {device: cuda}`"),
        ("backend: {ranks: 2}", "`backend: {name: fsdp, ranks: N}`"),
        ("backend: {nproc_per_node: 2}", "`backend: {name: fsdp, ranks: N}`"),
        ("backend: {tensor: 2}", "`plugins: [megatron_backend]`"),
        ("plugins: [fsdp_backend]\nbackend: {name: fsdp, tensor: 2}", "`plugins: [megatron_backend]`"),
        ("plugins: [fsdp_backend]\nbackend: {name: fsdp, tensor_parallel_size: 2}", "`plugins: [megatron_backend]`"),
    ],
)
def test_another_way_to_train_on_many_gpus_is_told_the_one_here(failing: Failing, text: str, told: str) -> None:
    (line,) = failing(MINIMAL + text + "\n")
    assert told in line


def test_problem_in_a_named_reward_has_its_key_path(failing: Failing) -> None:
    (line,) = failing(
        MINIMAL + "evaluation:\n  generate:\n    rewards:\n      ok: {name: exact_match, ignore_cas: 1}\n"
    )
    assert line.startswith("run.yaml:7: evaluation.generate.rewards.ok.ignore_cas is not a setting of 'exact_match'.")
