"""Which settings of the plugins a resume may change; those of core are in its own tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from run_helpers import Config

from spurline import load_config
from spurline.config.compare import Difference, differences
from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume, Section
from spurline.plugins.host import PluginHost

BASE: dict[str, Any] = {
    "model": {"path": "some/model"},
    "data": {"train": {"path": "a.jsonl"}},
    "steps": 100,
    "trackers": [],
}
ROLLOUTS: dict[str, Any] = {
    **BASE,
    "source": {"name": "rollouts", "environment": {"rewards": {"exact": "exact_match"}}},
}
ASYNC: dict[str, Any] = {
    **BASE,
    "plugins": ["async_rl", "agents"],
    "source": {
        "name": "async_rollouts",
        "engine": "child_process",
        "correction": "tis",
        "environment": {"rewards": {"exact": "exact_match"}},
    },
}
FREE, TO_ROUNDING, BY_NAME, REFUSED = OnResume.FREE, OnResume.TO_ROUNDING, OnResume.BY_NAME, OnResume.REFUSED


def merged(base: Config, path: str, value: Any) -> Config:
    """The config with the setting at a dotted path replaced."""
    first, _, rest = path.partition(".")
    if not rest:
        return {**base, first: value}
    inner = base.get(first, {})
    return {**base, first: merged({"name": inner} if isinstance(inner, str) else inner, rest, value)}


def found(base: Config, **changes: Any) -> list[Difference]:
    changed = base
    for path, value in changes.items():
        changed = merged(changed, path.replace("__", "."), value)
    return differences(load_config(base).resolved(), load_config(changed, recorded=True).config)


@pytest.mark.parametrize(
    ("path", "value", "key", "mark"),
    [
        ("trackers", ["tensorboard"], "trackers.0", FREE),
        ("report", {"enabled": False}, "report.enabled", FREE),
        ("backend.probe", False, "backend.probe", FREE),
        ("backend.max_tokens_per_microbatch", 512, "backend.max_tokens_per_microbatch", TO_ROUNDING),
        ("backend.kernels", "none", "backend.kernels", TO_ROUNDING),
        ("backend.fp8", "emulated", "backend.fp8", BY_NAME),
        ("backend.device", "cpu", "backend.device", TO_ROUNDING),
        ("schedule", "linear", "schedule", BY_NAME),
        ("backend.precision", "bf16", "backend.precision", BY_NAME),
        ("loss", "dft", "loss", REFUSED),
        ("data.max_length", 7, "data.max_length", REFUSED),
        ("model.path", "other/model", "model.path", BY_NAME),
        ("backend.lora", {"rank": 4}, "backend.lora", REFUSED),
        ("source", ROLLOUTS["source"], "source", REFUSED),
    ],
)
def test_each_setting_of_a_supervised_run_is_in_its_class(path: str, value: Any, key: str, mark: OnResume) -> None:
    marks = {change.key: change.mark for change in found(BASE, **{path: value})}
    assert marks[key] is mark


@pytest.mark.parametrize(
    ("path", "value", "mark"),
    [
        ("source.held_out.max_prompts", 9, FREE),
        ("source.max_concurrent", 7, TO_ROUNDING),
        ("source.engine.deterministic", True, BY_NAME),
        ("source.sampling.temperature", 0.7, BY_NAME),
        ("source.correction", "tis", BY_NAME),
        ("source.advantage.normalize_std", False, BY_NAME),
        ("loss.kl", {"coefficient": 0.1}, BY_NAME),
        ("loss.entropy_metric", False, FREE),
        ("minibatches.update_epochs", 2, BY_NAME),
        ("source.advantage", "rloo", REFUSED),
        ("source.prompts_per_step", 4, REFUSED),
        ("source.environment.rewards", {"exact": {"name": "exact_match", "ignore_case": True}}, REFUSED),
        ("loss", "gspo", REFUSED),
    ],
)
def test_each_setting_of_reinforcement_learning_is_in_its_class(path: str, value: Any, mark: OnResume) -> None:
    changes = found(ROLLOUTS, **{path: value})
    assert changes
    assert {change.mark for change in changes} == {mark}, changes


@pytest.mark.parametrize(
    ("path", "value", "mark"),
    [
        ("source.engine.engines", 2, FREE),
        ("source.weight_sync", "shared_memory", FREE),
        ("source.engine.num_threads", 2, TO_ROUNDING),
        ("source.max_staleness", 3, BY_NAME),
        ("source.order", "fifo", BY_NAME),
        ("source.engine", "vllm", BY_NAME),
    ],
)
def test_each_setting_of_asynchronous_rollouts_is_in_its_class(path: str, value: Any, mark: OnResume) -> None:
    assert {change.mark for change in found(ASYNC, **{path: value})} == {mark}


def test_enabling_a_plugin_is_one_change_whatever_it_replaces() -> None:
    changes = {change.key: change.mark for change in found(BASE, plugins=["collation_fast"])}
    assert changes.pop("plugins") is BY_NAME
    assert changes == {"tokenization": FREE, "prefetch": FREE}


def test_a_section_of_a_plugin_comes_and_goes_with_it() -> None:
    assert [change.key for change in found(BASE, plugins=["plugin_template"])] == ["plugins"]


def test_a_mark_in_a_config_of_a_third_party_counts_down_to_the_next_mark() -> None:
    assert {change.key: change.mark for change in found(ROLLOUTS, loss__kl={"estimator": "k2"})} == {
        "loss.kl.estimator": BY_NAME
    }


def unmarked(section: type[Section]) -> Iterator[str]:
    """Fields of a config that a resume refuses to see changed."""
    for name, field in section.model_fields.items():
        if name != "name" and not any(isinstance(item, OnResume) for item in field.metadata):
            yield f"{section.__name__}.{name}"


def test_settings_that_a_resume_refuses_are_those_that_somebody_thought_of() -> None:
    """A new setting has to be sorted: mark it, or add it here because it decides what is trained on."""
    registry = PluginHost.load(["collation_fast", "async_rl", "agents"]).registry
    free_kinds = {"tracker", "report_panel", "tokenization", "prefetch", "collator", "rollout_engine", "correction"}
    free_kinds |= {"weight_sync", "evaluation", "schedule"}
    refused: set[str] = set()
    for entry in registry.entries():
        if entry.kind not in free_kinds:
            refused |= set(unmarked(entry.config))
    kinds = {name.partition(".")[2] for name in refused}
    assert kinds == {
        # datasets
        *("format", "columns", "weight", "on_bad_row", "label", "subset", "split", "revision", "append_eos"),
        # orders of samples
        *("column", "direction", "failed", "floor", "pool_batches", "reward", "solved", "stages"),
        # losses, rewards, environments
        *("loss_type", "ignore_case", "rewards", "history", "command", "ignore_sampling"),
        # sources
        *("prompts_per_step", "samples_per_prompt", "environment", "advantage", "faults", "carry"),
        *("buffer_rows", "shuffle"),
        # what an optimizer keeps of which parameters
        *("adamw_matrices", "smallest"),
        # the backend
        "lora",
    }


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"name": "tools", "tools": {"look": "{}/mine.py:look"}, "rewards": {"exact": "exact_match"}}, "tools.look"),
        ({"name": "harness", "agent": "{}/mine.py:run"}, "agent"),
    ],
)
def test_functions_whose_folder_moved_are_allowed_by_name(environment: dict[str, Any], path: str) -> None:
    """They are kept as absolute paths, so that a run of a moved folder could never go on otherwise."""

    def config(folder: str) -> RunConfig:
        placed = json.loads(json.dumps(environment).replace("{}", folder))
        return load_config(merged(ASYNC, "source.environment", placed), recorded=True).config

    before = config("/old").model_dump(mode="json")
    assert [(change.key, change.mark) for change in differences(before, config("/new"))] == [
        (f"source.environment.{path}", BY_NAME)
    ]
