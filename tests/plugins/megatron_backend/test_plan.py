"""What `spurline plan` says of a run on Megatron ranks: groups, memory, and models that they cannot divide."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from spurline.config.loading import load_config
from spurline_planning.plan import Plan, make_plan

PUBLISHED = Path(__file__).parent / "published"
GIB = 2**30
BACKEND = {"name": "megatron", "device": "cuda", "ranks": 8, "precision": "bf16"}


@pytest.fixture
def config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "plugins": ["megatron_backend"],
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "max_length": 64},
        "batch_size": 16,
        "steps": 2,
        "collator": {"name": "packed", "max_tokens": 64},
        "backend": BACKEND,
    }


def planned(config: dict[str, Any], *, gib: float | None = None, **backend: Any) -> Plan:
    loaded = load_config({**config, "backend": {**config["backend"], **backend}})
    return make_plan(loaded, device_bytes=None if gib is None else int(gib * GIB))


def with_published(config: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """The config with a published model's config, the tiny tokenizer and no weights."""
    folder.mkdir()
    for file in Path(config["model"]["path"]).iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text((PUBLISHED / f"{name}.json").read_text())
    return config | {"model": {"path": str(folder), "init": "random"}, "batch_size": 512}


def test_a_published_recipe_for_llama_70b_fits_its_gpus_and_one_machine_gets_a_suggestion(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Megatron-Bridge trains it so on 64 H100 (docs: perf_recipes.llama.h100.llama3)."""
    config = with_published(config, tmp_path / "model", "llama-3-70b")
    recipe = {"tensor": 4, "pipeline": 4, "context": 2, "virtual_stages": 5, "max_tokens_per_microbatch": 8192}
    plan = planned(config, gib=80, ranks=64, launch="ray", ranks_per_node=8, **recipe)
    assert plan.sections["memory (estimate)"][-1] == "fits a device of 80.0 GiB"
    lacking = planned(config, gib=80).sections["memory (estimate)"]
    assert lacking[-1].startswith("suggestion: ")
    assert "backend.ranks=" in lacking[-1]


def test_a_plan_tells_ranks_and_groups(config: dict[str, Any]) -> None:
    plan = planned(config, ranks=16, tensor=2, pipeline=2, context=2, launch="ray", ranks_per_node=8)
    assert plan.problems == []
    assert plan.sections["parallel layout"] == [
        "16 ranks on 2 machines of a Ray cluster, cuda, bf16: 2 data x 2 pipeline x 2 context x 2 tensor",
        "2 neighbouring ranks divide each matrix, and between them the tokens",
        "2 ranks share each sequence",
        "2 stages of 1 layers each",
        "the optimizer is divided among the 4 ranks with the same part of the model",
    ]


def test_a_plan_says_which_groups_lie_across_machines(config: dict[str, Any]) -> None:
    said = planned(config, ranks=8, tensor=2, context=2, launch="ray", ranks_per_node=2).sections["parallel layout"]
    assert said[-1] == "groups of context lie across machines, as each has 2 ranks: slow"


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (
            {"tensor": 4},
            "backend.tensor is 4, which does not divide the model's 2 key and value heads. Choose one of 1, 2.",
        ),
        ({"tensor": 2, "context": 4}, "backend.context is 4, which does not divide the 2 attention heads that a rank"),
        ({"pipeline": 4}, "backend.pipeline makes 4 stages, and the model has 2 layers, of which each needs one"),
        ({"pipeline": 2, "virtual_stages": 2}, "backend.virtual_stages makes 4 parts of stages, and the model has 2"),
        ({"expert": 2}, "backend.expert is 2, and the model has no experts. Set expert to 1."),
    ],
)
def test_a_plan_finds_a_model_that_the_ranks_cannot_divide(
    config: dict[str, Any], backend: dict[str, Any], said: str
) -> None:
    problems = [str(problem) for problem in planned(config, **backend).problems]
    assert any(said in problem for problem in problems), problems


def test_a_plan_without_weights_sizes_the_run_and_names_them_last(config: dict[str, Any], tmp_path: Path) -> None:
    drawn = with_published(config, tmp_path / "model", "llama-3-70b")
    loaded = drawn | {"model": {"path": drawn["model"]["path"]}}
    expected, plan = planned(drawn, gib=80), planned(loaded, gib=80)
    assert plan.sections == expected.sections
    assert {"parallel layout", "memory (estimate)"} <= plan.sections.keys()
    assert [str(problem) for problem in plan.problems[:-1]] == [str(problem) for problem in expected.problems]
    assert "no weights can be loaded from folder" in str(plan.problems[-1])


def test_settings_that_save_memory_stay_valid_and_each_needs_no_more(config: dict[str, Any], tmp_path: Path) -> None:
    config = with_published(config, tmp_path / "model", "qwen3-235b-a22b")
    backend = {**BACKEND, "ranks": 64, "launch": "ray", "ranks_per_node": 8}
    run = load_config(config | {"backend": backend}).config
    step = 4096, 4096 * 512
    changes: dict[str, Any] = {}
    before = math.inf
    for change in run.backend.savings(run, *step):
        changes |= change
        changed = load_config(config | {"backend": {**backend, **changes}}).config
        changed.backend.check_model(changed)
        total = changed.backend.estimate_memory(changed, *step).peak
        assert total <= before, change
        before = total
    assert {"recompute", "max_tokens_per_microbatch", "expert", "tensor", "pipeline"} <= changes.keys()
