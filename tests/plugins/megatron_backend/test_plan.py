"""What `spurline plan` says of a run on Megatron ranks: groups, memory, models that they cannot divide, and
layouts that fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_plans import PUBLISHED, config_of, planned, published, with_model

from spurline.config.loading import load_config
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.layout_search import Candidate, find_layouts, idle_share, sent_bytes
from spurline_megatron_backend.planning import estimate_fullest
from spurline_planning.plan import make_plan

GIB = 2**30
BACKEND = {"name": "megatron", "device": "cuda", "ranks": 8, "precision": "bf16"}


@pytest.fixture
def config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    return config_of("megatron", spurline_tiny_model, spurline_chat_file, tmp_path)


def with_published(config: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    return with_model(config, folder, (PUBLISHED / f"{name}.json").read_text()) | {"batch_size": 512}


def searched(
    config: dict[str, Any], a: Architecture | str, ranks: int, usable: float, rows: int, row_length: int
) -> tuple[list[Candidate], Candidate]:
    run = load_config(
        config | {"backend": {**BACKEND, "ranks": ranks, "launch": "ray", "ranks_per_node": min(8, ranks)}}
    ).config
    a = read_architecture(published(a)) if isinstance(a, str) else a
    return find_layouts(cast(MegatronBackendConfig, run.backend), run, a, row_length, rows * row_length, usable)


def sizes(candidate: Candidate) -> dict[str, int]:
    return {key: getattr(candidate.config, key) for key in ("tensor", "pipeline", "context", "expert")}


def test_llama_70b_on_64_devices_of_80_gib_gets_a_layout_of_the_published_family(config: dict[str, Any]) -> None:
    """Megatron-Bridge trains it on 64 H100 with tensor 4, pipeline 4, context 2, virtual 5 in bf16 and tensor 4,
    pipeline 8 in fp8 (docs: perf_recipes.llama.h100.llama3); tensor 8, pipeline 2, context 2 for rows of 16 k tokens
    (recipes.llama.llama3_70b_16k)."""
    found = searched(config, "llama-3-70b", 64, 72 * GIB, rows=256, row_length=8192)
    shown = [sizes(candidate) for candidate in found[0][:5]]
    assert {"tensor": 4, "pipeline": 4, "context": 2, "expert": 1} in shown
    assert {"tensor": 4, "pipeline": 8, "context": 1, "expert": 1} in shown


def test_qwen3_235b_fits_128_devices_of_141_gib_in_layouts_of_the_published_family(config: dict[str, Any]) -> None:
    """Megatron-Bridge: tensor 2, pipeline 8, expert 32 on 256 H100; tensor 1, pipeline 8, expert 8 on 64 B200; tensor
    4, pipeline 16, context 2, expert 8 (docs: performance summaries, recipes.qwen.qwen3_moe). verl: tensor 4, pipeline
    8, expert 4 (run_qwen3-236b_megatron.sh). SkyRL: tensor 4, pipeline 16, expert 4."""
    found = searched(config, "qwen3-235b-a22b", 128, 0.9 * 141 * GIB, rows=1024, row_length=4096)
    fitting = [sizes(candidate) for candidate in found[0]]
    assert {"tensor": 4, "pipeline": 16, "context": 2, "expert": 8} in fitting
    assert {"tensor": 4, "pipeline": 16, "context": 1, "expert": 4} in fitting


@pytest.mark.parametrize(
    ("name", "ranks", "gib"), [("llama-3-70b", 64, 80), ("qwen3-235b-a22b", 128, 141)], ids=["70b", "235b"]
)
def test_a_plan_names_layouts_that_fit_and_what_is_set_from_them_does(
    config: dict[str, Any], tmp_path: Path, name: str, ranks: int, gib: float
) -> None:
    config = with_published(config, tmp_path / "model", name)
    said = planned(config, gib=gib, ranks=ranks, launch="ray", ranks_per_node=8).sections["layouts (estimate)"]
    # One copy of the model on each rank: its gradients are the part that no other rank shares.
    assert "does not fit: most of it is gradients" in said[0]
    suggested = said[1].partition(": ")[0].split()
    overrides = [word for word in suggested if word != "--set"]
    assert overrides
    backend = {**BACKEND, "ranks": ranks, "launch": "ray", "ranks_per_node": 8}
    again = make_plan(load_config(config | {"backend": backend}, overrides), device_bytes=int(gib * GIB))
    assert [problem for problem in again.problems if "backend" in str(problem)] == []
    assert again.sections["memory (estimate)"][-1] == f"fits a device of {gib:.1f} GiB"
    assert again.sections["layouts (estimate)"][0].endswith("; fits")


def test_what_is_set_from_a_suggestion_is_that_layout_whatever_was_set_before(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config = with_published(config, tmp_path / "model", "llama-3-70b")
    before = {"tensor": 2, "pipeline": 2, "virtual_stages": 5, "context": 2}
    backend = {**BACKEND, "ranks": 64, "launch": "ray", "ranks_per_node": 8, "recompute": "full", **before}
    run = load_config(config | {"backend": backend}).config
    lines = list(run.backend.suggested_layouts(run, 8192, 8192 * 64, 72 * GIB))
    found = searched(config, "llama-3-70b", 64, 72 * GIB, rows=64, row_length=8192)
    for line, candidate in zip(lines[1:], found[0], strict=False):
        overrides = [word for word in line.partition(": ")[0].split() if word != "--set"]
        layout = cast(MegatronBackendConfig, load_config(config | {"backend": backend}, overrides).config.backend)
        expected = candidate.config
        assert layout.grid == expected.grid
        assert layout.max_tokens_per_microbatch == expected.max_tokens_per_microbatch
        assert layout.recompute == expected.recompute


def test_a_plan_says_how_near_the_nearest_layout_comes(config: dict[str, Any], tmp_path: Path) -> None:
    config = with_published(config, tmp_path / "model", "llama-3-70b")
    said = planned(config, gib=80).sections["layouts (estimate)"]
    assert said[-1].startswith("no layout fits. --set backend.tensor=8 ")
    assert "(72.0 GiB can be used); most of it is optimizer, " in said[-1]


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


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ARCHITECTURES, st.sampled_from([2, 4, 8]), st.integers(8, 64))
def test_what_is_found_divides_the_model_and_fits_and_what_sends_least_comes_first(
    config: dict[str, Any], architecture: Architecture, ranks: int, rows: int
) -> None:
    run = load_config(config | {"backend": {**BACKEND, "ranks": ranks}}).config
    backend, step = cast(MegatronBackendConfig, run.backend), (4096, 4096 * rows)
    usable = 1.3 * estimate_fullest(backend, run, architecture, *step).peak / ranks
    found, smallest = searched(config, architecture, ranks, usable, rows, 4096)
    for candidate in found:
        grid = candidate.config.grid
        assert smallest.memory.peak <= candidate.memory.peak <= usable
        assert architecture.key_value_heads % grid.tensor == 0
        assert 16 // grid.tensor % grid.context == 0
        assert grid.pipeline * grid.virtual_stages <= architecture.num_layers
        assert grid.data * grid.ranks_of_rows == ranks
    keys = [(candidate.idle > 0.1, candidate.config.recompute == "full", candidate.sent) for candidate in found]
    assert keys == sorted(keys)


def test_what_a_rank_sends_is_worked_out_by_hand() -> None:
    a, step = read_architecture(published("llama-3-70b")), (8192, 8192 * 64)
    values = 70.55e9

    def sent(a: Architecture, ranks: int, **layout: Any) -> int:
        return sent_bytes(MegatronBackendConfig(**{**BACKEND, "ranks": ranks, **layout}), a, *step)

    # A ring sums gradients in fp32 and gathers weights in bf16.
    assert sent(a, 64) == pytest.approx(6 * values * 63 / 64, rel=0.01)
    # Of 64 micro-batches of 8,192 tokens, each is sent 8 times in each of 80 layers, 8,192 values in bf16.
    activations = 64 * 8192 * 8192 * 2
    of_row = {"max_tokens_per_microbatch": 8192}
    assert sent(a, 8, tensor=8, **of_row) == pytest.approx(80 * 8 * 7 / 8 * activations, rel=0.01)
    # Half of the tokens, in each of 80 layers twice: 64 heads of queries and of results, 8 of keys and of values.
    exchanged = 80 * 2 * (64 + 64 + 8 + 8) / 64 / 2 * activations / 2
    assert sent(a, 2, context=2, **of_row) - 6 * values / 2 == pytest.approx(exchanged, rel=0.01)
    # Stages of 5 parts pass on each token and its gradient.
    assert sent(a, 8, pipeline=8, virtual_stages=5, **of_row) == pytest.approx(2 * 5 * activations)
    moe = read_architecture(published("qwen3-235b-a22b"))
    apart = sent(moe, 2, expert=2, **of_row) - sent(moe, 2, **of_row)
    # Half of the 8 copies of each token go and come back in two passes; gradients of experts need no sum any more.
    copies = 94 * 2 * 2 * 8 / 2 * 32 * 8192 * 4096 * 2
    experts = 94 * 128 * 3 * 4096 * 1536
    assert apart == pytest.approx(copies - 6 * experts / 2, rel=0.01)


def test_interleaving_shortens_the_wait_for_other_stages() -> None:
    a = read_architecture(published("llama-3-70b"))
    # 8 stages and 64 micro-batches on one copy: 7 of 71 turns.
    assert idle_share(Grid(8, pipeline=8), a, 64) == pytest.approx(7 / 71)
    assert idle_share(Grid(8, pipeline=8, virtual_stages=5), a, 64) == pytest.approx(7 / (5 * 64 + 7))
    # All wait for a stage of 12 layers where others have 11 or less.
    assert idle_share(Grid(7, pipeline=7), a, 64) == pytest.approx(1 - 64 * 80 / 7 / (70 * 12))


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
        "2 neighbouring ranks divide each matrix, and the tokens outside of matrices",
        "2 ranks share each sequence",
        "2 stages of 1 layers each",
        "the optimizer is divided among the 4 ranks with the same part of the model",
    ]


def test_a_plan_says_which_groups_lie_across_machines(config: dict[str, Any]) -> None:
    said = planned(config, ranks=8, tensor=2, context=2, launch="ray", ranks_per_node=2).sections["parallel layout"]
    assert said[-1] == "groups of context span several machines, which is slow: a machine has 2 ranks"


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"tensor": 4}, "backend.tensor is 4, which does not divide the 2 key and value heads. Choose one of 1, 2."),
        ({"tensor": 2, "context": 4}, "backend.context is 4, which does not divide the 2 attention heads that a rank"),
        ({"pipeline": 4}, "backend.pipeline makes 4 stages"),
        ({"pipeline": 2, "virtual_stages": 2}, "backend.virtual_stages makes 4 parts of stages"),
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
        total = changed.backend.estimate_memory(changed, *step).peak
        assert total <= before, change
        before = total
    assert {"recompute", "max_tokens_per_microbatch", "ranks"} <= changes.keys()
