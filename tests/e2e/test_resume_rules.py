"""Which settings of the plugins a resume may change; those of core are in its own tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from config_files import merged
from run_helpers import Config

from spurline import load_config
from spurline.config.compare import differences
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
REPRODUCIBLE: dict[str, Any] = {
    **BASE,
    "plugins": ["fsdp_backend"],
    "backend": {"name": "fsdp", "device": "cpu", "ranks": 2, "num_threads": 1, "sums": "reproducible"},
}
FAST = merged(REPRODUCIBLE, "backend.sums", "fast")
FREE, TO_ROUNDING, BY_NAME, REFUSED = OnResume.FREE, OnResume.TO_ROUNDING, OnResume.BY_NAME, OnResume.REFUSED


@pytest.mark.parametrize(
    ("base", "path", "value", "mark"),
    [
        (BASE, "report", {"enabled": False}, FREE),
        (BASE, "cluster", {"runtime_env": {"env_vars": {"HF_TOKEN": "another"}}}, FREE),
        (BASE, "backend.max_tokens_per_microbatch", 512, TO_ROUNDING),
        (BASE, "schedule", "linear", BY_NAME),
        (BASE, "model.path", "other/model", BY_NAME),
        (BASE, "loss", "dft", REFUSED),
        (BASE, "data.max_length", 7, REFUSED),
        (BASE, "backend.lora", {"rank": 4}, REFUSED),
        (ROLLOUTS, "source.held_out.max_prompts", 9, FREE),
        (ROLLOUTS, "source.max_concurrent", 7, TO_ROUNDING),
        (ROLLOUTS, "source.sampling.temperature", 0.7, BY_NAME),
        (ROLLOUTS, "loss.kl", {"coefficient": 0.1}, BY_NAME),
        (ROLLOUTS, "source.advantage", "rloo", REFUSED),
        (ROLLOUTS, "source.environment.rewards", {"exact": {"name": "exact_match", "ignore_case": True}}, REFUSED),
        (ASYNC, "source.weight_sync", "shared_memory", FREE),
        (ASYNC, "source.engine.num_threads", 2, TO_ROUNDING),
        (ASYNC, "source.max_staleness", 3, BY_NAME),
        (REPRODUCIBLE, "backend.ranks", 3, FREE),
        (REPRODUCIBLE, "collator", "padded", FREE),
        (REPRODUCIBLE, "backend.num_threads", 2, TO_ROUNDING),
        (FAST, "backend", {**REPRODUCIBLE["backend"], "ranks": 3}, TO_ROUNDING),
    ],
)
def test_each_setting_is_in_its_class(base: Config, path: str, value: Any, mark: OnResume) -> None:
    changed = load_config(merged(base, path, value), recorded=True).config
    changes = differences(load_config(base).resolved(), changed)
    assert changes
    assert {change.mark for change in changes} == {mark}, changes


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
        *("format", "columns", "weight", "share", "on_bad_row", "label", "subset", "split", "revision", "append_eos"),
        *("constants", "skip", "limit"),
        # orders of samples
        *("column", "direction", "failed", "floor", "pool_batches", "reward", "solved", "stages"),
        # losses, rewards, environments
        *("loss_type", "ignore_case", "rewards", "history", "command", "ignore_sampling"),
        # several environments, tool formats
        *("environments", "advantages", "other", "parser", "reasoning"),
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
