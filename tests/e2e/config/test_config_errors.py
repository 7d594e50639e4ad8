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


def test_all_problems_are_listed_at_once_in_file_order(failing: Failing) -> None:
    lines = failing(
        "model: {path: m}\n"
        "data:\n"
        "  train: rows.jsonl\n"
        "  max_lenght: 5\n"
        "steps: 0\n"
        "collator: pakced\n"
        "optimizer:\n"
        "  betas: [0.9, 2]\n"
    )
    assert [line.split(" ")[:2] for line in lines] == [
        ["run.yaml:4:", "data.max_lenght"],
        ["run.yaml:5:", "steps"],
        ["run.yaml:6:", "collator"],
        ["run.yaml:8:", "optimizer.betas.1"],
    ]


def test_unknown_component_gets_a_near_miss_and_what_is_available(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "loss: cros_entropy\n")
    assert (
        "run.yaml:4: loss is 'cros_entropy', but no loss has that name. Did you mean 'cross_entropy'? Available:"
        in line
    )


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
    place = f"set source.advantage: {advantage} (with source.name: rollouts), and {beside}. Available: "
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


@pytest.mark.parametrize("written", ["Cross-Entropy", "crossentropy", "cross_entorpy", "cros_entropy"])
def test_a_slip_of_the_pen_is_corrected(failing: Failing, written: str) -> None:
    (line,) = failing(MINIMAL + f"loss: {written}\n")
    assert "Did you mean 'cross_entropy'?" in line


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trackers: wandb", "trackers is 'wandb'; it must be a list, such as [wandb]."),
        (
            "backend: {lora: true}",
            "backend.lora is True; it must be a mapping, written `key: value`, or {} for the defaults.",
        ),
        (
            "loss: {name: ppo, kl: 0.1}",
            "loss.kl is 0.1; it must be a mapping, written `key: value`, such as {coefficient: 0.1}.",
        ),
        # Of several settings that a number could be, none is guessed.
        ("checkpoint: 5", "checkpoint is 5; it must be a mapping, written `key: value`."),
        ("run_dir: null", "run_dir is null, which it cannot be. Give it a value, or leave the line out"),
    ],
)
def test_a_value_of_the_wrong_shape_is_told_the_right_one(failing: Failing, text: str, told: str) -> None:
    (line,) = failing(MINIMAL + text + "\n")
    assert told in line


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("steps", "steps: true"),
        ("optimizer.learning_rate", "optimizer: {learning_rate: true}"),
        # In a list, under a union with null, and inside a component that is chosen by its name.
        ("optimizer.betas.1", "optimizer: {name: adamw, betas: [0.9, false]}"),
        ("backend.rows_per_microbatch", "backend: {rows_per_microbatch: true}"),
        ("trackers.0.every_steps", "trackers: [{name: console, every_steps: true}]"),
    ],
)
def test_true_and_false_are_no_numbers(failing: Failing, key: str, text: str) -> None:
    (line,) = failing(MINIMAL.replace("steps: 3\n", "" if key == "steps" else "steps: 3\n") + text + "\n")
    assert f": {key} is {'False' if 'false' in text else 'True'}: it must be a number, not true or false." in line


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
        (
            "source: {name: rollouts, environment: {rewards: my_rewards.py}}",
            "is 'my_rewards.py', a file, of which a function must be named too: `my_rewards.py:my_function`.",
        ),
        (
            f"source: {{name: rollouts, {REWARDS}, held_out: {{success: right}}}}",
            "source.held_out.success is 'right'; it must be a mapping, written `key: value`, such as {reward: right}.",
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


def test_near_misses_do_not_depend_on_case(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "loss: Cross_Entropy\n")
    assert "Did you mean 'cross_entropy'?" in line
    (line,) = failing(MINIMAL + "Batch_Size: 3\n")
    assert "Did you mean 'batch_size'?" in line


def test_value_that_fits_none_of_several_types_is_one_problem_at_its_own_key(failing: Failing) -> None:
    (line,) = failing(MINIMAL + "backend: {lora: {target_modules: 5}}\n")
    assert line.startswith("run.yaml:4: backend.lora.target_modules is 5; it must be a list. Or: ")


def test_problem_in_a_named_reward_has_its_key_path(failing: Failing) -> None:
    (line,) = failing(
        MINIMAL + "evaluation:\n  generate:\n    rewards:\n      ok: {name: exact_match, ignore_cas: 1}\n"
    )
    assert line.startswith("run.yaml:7: evaluation.generate.rewards.ok.ignore_cas is not a setting of 'exact_match'.")


def test_broken_item_of_a_list_is_reported_once_with_its_index(failing: Failing) -> None:
    (line,) = failing("model: {path: m}\nsteps: 1\ndata:\n  train:\n    - path: a\n      splt: b\n")
    assert line.startswith("run.yaml:6: data.train.0.splt is not a setting of 'hf'. Did you mean 'split'?")


def test_cross_field_problems_of_components_are_collected(failing: Failing) -> None:
    lines = failing(
        MINIMAL + "collator:\n  max_tokens: 5\nbackend: {rows_per_microbatch: 1, max_tokens_per_microbatch: 1}\n"
    )
    assert [line.split(" ")[1] for line in lines] == ["collator.max_tokens", "backend.rows_per_microbatch"]
    assert lines[0].startswith("run.yaml:5: ")
