"""What `spurline plan` says of a run on Megatron ranks: groups, models that they cannot divide, layouts that fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from spurline.config.loading import load_config
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.layout_search import Candidate, Found, find_layouts
from spurline_megatron_backend.memory import Kept, fullest, layout_of
from spurline_megatron_backend.step_time import DEVICES, Speeds, device_of, estimate_step, least_time
from spurline_megatron_backend.workload import Layout, Step
from spurline_models.optimizers.configs import AdamWConfig
from spurline_planning.plan import Plan, make_plan

PUBLISHED = Path(__file__).parent / "published"
GIB = 2**30
BF16 = Kept(2, 4096, AdamWConfig())
BACKEND = {"name": "megatron", "device": "cuda", "ranks": 8, "precision": "bf16"}


def architecture_of(name: str) -> Architecture:
    return read_architecture(AutoConfig.for_model(**json.loads((PUBLISHED / f"{name}.json").read_text())))


def searched(name: str, ranks: int, gib: float, rows: int, row_length: int) -> Found:
    speeds = Speeds(device_of(int(gib * GIB)))
    step = Step(row_length, rows * row_length)
    return find_layouts(architecture_of(name), ranks, step, BF16, speeds, 0.9 * gib * GIB)


def sizes(candidate: Candidate) -> dict[str, int]:
    grid = candidate.layout.grid
    return {"tensor": grid.tensor, "pipeline": grid.pipeline, "context": grid.context, "expert": grid.expert}


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


def test_llama_70b_on_64_devices_of_80_gib_gets_a_layout_of_the_published_family() -> None:
    """Megatron-Bridge trains it on 64 H100 with tensor 4, pipeline 4, context 2, virtual 5 in bf16 and tensor 4,
    pipeline 8 in fp8 (docs: perf_recipes.llama.h100.llama3); tensor 8, pipeline 2, context 2 for rows of 16 k tokens
    (recipes.llama.llama3_70b_16k)."""
    found = searched("llama-3-70b", 64, 80, rows=256, row_length=8192)
    best = sizes(found.best[0])
    assert best["tensor"] in (4, 8)
    assert best["pipeline"] in (2, 4, 8)
    assert best["context"] <= 2
    shown = [sizes(candidate) for candidate in found.best[:3]]
    assert {"tensor": 4, "pipeline": 4, "context": 2, "expert": 1} in shown


def test_qwen3_235b_on_128_devices_of_141_gib_gets_a_layout_of_the_published_family() -> None:
    """Megatron-Bridge: tensor 2, pipeline 8, expert 32 on 256 H100; tensor 1, pipeline 8, expert 8 on 64 B200; tensor
    4, pipeline 16, context 2, expert 8 (docs: performance summaries, recipes.qwen.qwen3_moe). verl: tensor 4, pipeline
    8, expert 4 (run_qwen3-236b_megatron.sh). SkyRL: tensor 4, pipeline 16, expert 4."""
    found = searched("qwen3-235b-a22b", 128, 141, rows=1024, row_length=4096)
    best = sizes(found.best[0])
    assert best["tensor"] in (1, 2, 4)
    assert best["pipeline"] in (4, 8, 16)
    assert best["expert"] in (4, 8, 16, 32)
    assert best["context"] <= 2


@pytest.mark.parametrize(
    ("name", "ranks", "layout", "row_length", "rows", "published"),
    [
        # Megatron-Bridge 25.11 and 26.02 on H100, in fp8: tokens per second and device.
        ("llama-3-70b", 64, Layout(Grid(64, 4, 8, 5), 8192), 8192, 128, 1602),
        ("qwen3-235b-a22b", 256, Layout(Grid(256, 2, 8, 4, 1, 32), 4096), 4096, 2048, 1575),
    ],
)
def test_estimated_throughput_is_near_what_is_published_of_the_same_layout(
    name: str, ranks: int, layout: Layout, row_length: int, rows: int, published: float
) -> None:
    step = Step(row_length, rows * row_length)
    time = estimate_step(architecture_of(name), layout, step, Speeds(DEVICES[1]))
    assert 0.5 < step.tokens / time.total / ranks / published < 1.5


@pytest.mark.parametrize(
    ("name", "ranks", "gib"), [("llama-3-70b", 8, 80), ("llama-3-70b", 16, 40), ("qwen3-235b-a22b", 16, 80)]
)
def test_too_few_devices_are_refused_with_the_part_that_takes_most(name: str, ranks: int, gib: float) -> None:
    found = searched(name, ranks, gib, rows=64, row_length=4096)
    assert found.best == []
    assert found.nearest is not None
    assert found.nearest.total > 0.9 * gib * GIB
    assert found.nearest.largest[0] == "optimizer"


@pytest.mark.parametrize(
    ("name", "ranks", "gib"), [("llama-3-70b", 64, 80), ("qwen3-235b-a22b", 128, 141)], ids=["70b", "235b"]
)
def test_a_plan_names_layouts_that_fit_and_what_is_set_from_them_does(
    config: dict[str, Any], tmp_path: Path, name: str, ranks: int, gib: float
) -> None:
    config = with_published(config, tmp_path / "model", name)
    said = planned(config, gib=gib, ranks=ranks, launch="ray", ranks_per_node=8).sections["layouts (estimate)"]
    assert said[0].startswith(f"of {ranks} ranks, each ")
    # One copy of the model on each rank: its gradients are the part that no other rank shares.
    assert "does not fit: most of it is gradients" in said[1]
    suggested = said[2].partition(": ")[0].split()
    overrides = [word for word in suggested if word != "--set"]
    assert overrides
    backend = {**BACKEND, "ranks": ranks, "launch": "ray", "ranks_per_node": 8}
    again = make_plan(load_config(config | {"backend": backend}, overrides), device_bytes=int(gib * GIB))
    assert [problem for problem in again.problems if "backend" in str(problem)] == []
    assert again.sections["memory (estimate)"][-1] == f"fits a device of {gib:.1f} GiB"
    assert again.sections["layouts (estimate)"][1].endswith("; fits")


@pytest.mark.parametrize("sequence_parallel", [None, True, False])
def test_what_is_set_from_a_suggestion_is_that_layout_whatever_was_set_before(
    config: dict[str, Any], tmp_path: Path, sequence_parallel: bool | None
) -> None:
    config = with_published(config, tmp_path / "model", "llama-3-70b")
    sizes = {"tensor": 2, "pipeline": 2, "virtual_stages": 5, "context": 2, "sequence_parallel": sequence_parallel}
    backend = {**BACKEND, "ranks": 64, "launch": "ray", "ranks_per_node": 8, "recompute": "full", **sizes}
    run = load_config(config | {"backend": backend}).config
    lines = list(run.backend.suggested_layouts(run, 8192, 8192 * 64, 80 * GIB, 72 * GIB))
    found = searched("llama-3-70b", 64, 80, rows=64, row_length=8192)
    for line, candidate in zip(lines[2:], found.best, strict=False):
        overrides = [word for word in line.partition(": ")[0].split() if word != "--set"]
        assert (
            layout_of(cast(Any, load_config(config | {"backend": backend}, overrides).config.backend))
            == candidate.layout
        )


def test_a_plan_says_how_near_the_nearest_layout_comes(config: dict[str, Any], tmp_path: Path) -> None:
    config = with_published(config, tmp_path / "model", "llama-3-70b")
    said = planned(config, gib=80).sections["layouts (estimate)"]
    assert said[-1].startswith("none fits. Nearest comes --set backend.tensor=8 ")
    assert "of 72.0 GiB: most of it is optimizer, " in said[-1]


def test_no_layouts_are_named_where_no_device_is_known(config: dict[str, Any]) -> None:
    assert "layouts (estimate)" not in planned(config).sections


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


def test_a_size_is_1_where_the_model_and_the_ranks_leave_no_other(config: dict[str, Any]) -> None:
    problems = [str(problem) for problem in planned(config, ranks=3, tensor=3).problems]
    assert any("backend.tensor is 3" in problem and problem.endswith("Set tensor to 1.") for problem in problems)


def test_a_plan_without_weights_sizes_the_run_and_names_them_last(config: dict[str, Any], tmp_path: Path) -> None:
    drawn = with_published(config, tmp_path / "model", "llama-3-70b")
    loaded = drawn | {"model": {"path": drawn["model"]["path"]}}
    expected, plan = planned(drawn, gib=80), planned(loaded, gib=80)
    assert plan.sections == expected.sections
    assert {"parallel layout", "memory (estimate)", "layouts (estimate)"} <= plan.sections.keys()
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
        total = sum(changed.backend.estimate_memory(changed, *step).values())
        assert total <= before, change
        before = total
    assert {"recompute", "max_tokens_per_microbatch", "expert", "tensor", "pipeline"} <= changes.keys()


ARCHITECTURES = st.builds(
    Architecture,
    st.just("model"),
    st.integers(2, 12),
    st.sampled_from([1024, 2048]),
    st.just(4096),
    st.just(16),
    st.sampled_from([2, 8]),
    st.just(64),
    st.just(32000),
    st.booleans(),
    st.just(1e-5),
)


@settings(max_examples=20)
@given(ARCHITECTURES, st.sampled_from([2, 4, 8]), st.integers(8, 64))
def test_what_is_found_divides_the_model_and_fits_and_nothing_that_is_tried_is_much_faster(
    architecture: Architecture, ranks: int, rows: int
) -> None:
    speeds, step = Speeds(DEVICES[1]), Step(4096, 4096 * rows)
    usable = 1.3 * sum(fullest(architecture, Layout(Grid(ranks)), step, BF16).values()) / ranks
    found = find_layouts(architecture, ranks, step, BF16, speeds, usable)
    times: list[float] = []
    powers = [1, 2, 4, 8]
    for tensor in powers:
        for pipeline in powers:
            for context in powers[:3]:
                layout = Layout(Grid(ranks, tensor, pipeline, 1, context), 4096, "full", tensor > 1)
                divides = architecture.key_value_heads % tensor == 0 and 16 // tensor % context == 0
                if ranks % (tensor * pipeline * context) or pipeline > architecture.num_layers or not divides:
                    continue
                if sum(fullest(architecture, layout, step, BF16).values()) <= usable:
                    times.append(estimate_step(architecture, layout, step, speeds).total)
    for candidate in found.best:
        grid = candidate.layout.grid
        assert candidate.total <= usable
        assert architecture.key_value_heads % grid.tensor == 0
        assert 16 // grid.tensor % grid.context == 0
        assert grid.pipeline * grid.virtual_stages <= architecture.num_layers
        assert grid.data * grid.ranks_of_rows == ranks
    assert bool(found.best) >= bool(times)
    if times:
        assert found.best[0].time.total <= 1.03 * min(times) * (1 + 1e-9)


@given(ARCHITECTURES, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(16, 64))
def test_a_step_takes_longer_than_its_operations_alone_and_less_on_more_ranks(
    architecture: Architecture, tensor: int, pipeline: int, rows: int
) -> None:
    step, speeds = Step(4096, 4096 * rows), Speeds(DEVICES[1])
    layout = Layout(Grid(8, tensor, pipeline), 4096, sequence_parallel=tensor > 1)
    time = estimate_step(architecture, layout, step, speeds)
    a = architecture
    weights = a.num_layers * a.hidden * (64 * (2 * a.heads + 2 * a.key_value_heads) + 3 * a.ffn)
    weights += a.hidden * a.vocabulary
    assert time.total > 6 * weights * step.tokens / 8 / DEVICES[1].bf16_flops
    assert least_time(architecture, layout, step, speeds) <= time.total
    assert (time.bubble > 0) == (pipeline > 1)
    assert (time.tensor > 0) == (tensor > 1)
    more = replace(layout, grid=replace(layout.grid, ranks=16))
    assert estimate_step(architecture, more, step, speeds).total <= time.total * 1.01


def test_exchanges_across_machines_take_longer_and_interleaving_shortens_the_wait() -> None:
    architecture, step = architecture_of("llama-3-70b"), Step(8192, 8192 * 64)
    layout = Layout(Grid(64, 8, 4), 8192)
    near, far = (estimate_step(architecture, layout, step, Speeds(DEVICES[1], machine)) for machine in (8, 4))
    assert far.tensor > 2 * near.tensor
    interleaved = replace(layout, grid=replace(layout.grid, virtual_stages=5))
    assert estimate_step(architecture, interleaved, step, Speeds(DEVICES[1])).bubble == pytest.approx(near.bubble / 5)


@pytest.mark.parametrize(("gib", "name"), [(40, "A100 40 GB"), (80, "H100"), (141, "H200"), (180, "B200")])
def test_the_memory_of_a_device_tells_its_kind(gib: int, name: str) -> None:
    assert device_of(gib * GIB).name == name
