"""What plan says that a rank holds: against ranks' own parameters, what they allocate, and published figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from backend_batches import lay_out, make_samples
from hypothesis import given
from hypothesis import strategies as st
from megatron_layouts import on, write_llama3, write_qwen3, write_qwen3_moe
from rank_plans import published

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import RunConfig
from spurline.protocols.loss import LossConfig, Objective
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import held_parameters
from spurline_megatron_backend.planning import (
    estimate_fullest,
    held_values,
    kept_values,
    microbatches_in_flight,
    savings,
)
from spurline_models.architecture import load_model_config
from spurline_models.dealing import deal
from spurline_models.optimizers.configs import AdamWConfig
from spurline_ranks.group import open_ranks
from spurline_ranks.messages import plain_objective, plain_run
from spurline_rl.losses.configs import PpoConfig
from spurline_rl.testing.backend_runs import backend_run


@st.composite
def models_on_grids(draw: st.DrawFn) -> tuple[Architecture, Grid, bool]:
    """A model and a grid that divides it, of at most a few hundred ranks; and whether it is a critic."""
    tensor, context, data = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    pipeline = draw(st.sampled_from([1, 2, 3]))
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    expert_tensor, expert = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    stage = math.lcm(tensor * context * data, expert * expert_tensor)
    experts = draw(st.sampled_from([0, 4]))
    if not experts:
        expert_tensor = expert = 1
    grid = Grid(stage * pipeline, tensor, pipeline, virtual, context, expert, expert_tensor)
    layers = draw(st.integers(pipeline * virtual, 3 * pipeline * virtual))
    architecture = Architecture(
        "model",
        layers,
        hidden=draw(st.sampled_from([16, 24])),
        ffn=32,
        heads=16,
        key_value_heads=draw(st.sampled_from([4, 8])),
        head_dim=4,
        vocabulary=draw(st.integers(5, 70)),
        tied=draw(st.booleans()),
        norm_epsilon=1e-5,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        num_experts=experts,
        experts_per_token=2 if experts else 0,
        expert_ffn=8 if experts else 0,
    )
    return architecture, grid, draw(st.booleans())


@given(models_on_grids())
def test_every_rank_holds_what_its_stage_is_said_to_hold(case: tuple[Architecture, Grid, bool]) -> None:
    architecture, grid, critic = case
    for rank in range(grid.ranks):
        place = grid.place(rank)
        parts = held_parameters(architecture, grid, place, critic=critic)
        held = [parameter for part in parts for parameter in part.values()]
        experts = sum(math.prod(parameter.shape) for parameter in held if parameter.is_expert)
        others = sum(math.prod(parameter.shape) for parameter in held if not parameter.is_expert)
        assert held_values(architecture, grid, place.pipeline, critic=critic) == (experts, others)


@pytest.mark.parametrize(("name", "billions"), [("llama-3-70b", 70.55), ("qwen3-235b-a22b", 235.09)])
def test_one_rank_holds_as_many_parameters_as_the_model_is_published_with(name: str, billions: float) -> None:
    assert sum(held_values(read_architecture(published(name)), Grid(1), 0)) / 1e9 == pytest.approx(billions, abs=0.01)


def a_run(*, replays_experts: bool = False) -> RunConfig:
    """What an estimate asks of a run that trains no critic and has no reference."""
    source = SimpleNamespace(facts=SimpleNamespace(replays_experts=replays_experts))
    return cast(Any, SimpleNamespace(frozen_roles=(), source=source, optimizer=AdamWConfig(), trained_critic=None))


def layout_on(grid: Grid, microbatch: int | None, recompute: Any = "none") -> MegatronBackendConfig:
    sizes = {key: size for key, size in asdict(grid).items() if key != "ranks"}
    of_step = {"max_tokens_per_microbatch": microbatch, "recompute": recompute}
    return MegatronBackendConfig(device="cuda", precision="bf16", ranks=grid.ranks, **sizes, **of_step)


@given(models_on_grids(), st.sampled_from(["none", "selective", "full"]), st.integers(1, 40))
def test_more_data_parallel_ranks_never_need_more_memory(
    case: tuple[Architecture, Grid, bool], recompute: Any, rows: int
) -> None:
    architecture, grid, _ = case

    def total(ranks: int) -> int:
        layout = layout_on(replace(grid, ranks=ranks), 64, recompute)
        return estimate_fullest(layout, a_run(), architecture, 64, 64 * rows).peak

    assert total(2 * grid.ranks) <= total(grid.ranks)


@given(models_on_grids(), st.integers(1, 40), st.sampled_from([64, 128, None]))
def test_recomputing_more_never_needs_more_memory_and_neither_do_smaller_micro_batches(
    case: tuple[Architecture, Grid, bool], rows: int, microbatch: int | None
) -> None:
    architecture, grid, _ = case
    # Of a single layer that is recomputed whole there is its input in addition.
    architecture = replace(architecture, num_layers=grid.pipeline * grid.virtual_stages * 4)

    def total(bound: int | None, recompute: Any) -> int:
        # Whole rows for every rank: two micro-batches of one row cannot be less than one of one and a half.
        return estimate_fullest(
            layout_on(grid, bound, recompute), a_run(), architecture, 64, 64 * rows * grid.data
        ).peak

    none, selective, full = (total(microbatch, recompute) for recompute in ("none", "selective", "full"))
    assert full <= selective <= none
    if grid.virtual_stages == 1:
        assert total(64, "none") <= none


def test_experts_that_are_replayed_lie_beside_a_step() -> None:
    layout, architecture = layout_on(Grid(8, expert=8), 4096), read_architecture(published("qwen3-235b-a22b"))
    without, replayed = (
        estimate_fullest(layout, a_run(replays_experts=replays), architecture, 4096, 8 * 8192).parts
        for replays in (False, True)
    )
    assert replayed == {**without, "routed experts": 2 * 8192 * 94 * 8 * 2}


class _AnchoredConfig(LossConfig):
    """The loss of a plugin, which learns from the data and stays near another model."""

    reads_logits: ClassVar[bool] = True

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"reference"})


@pytest.mark.parametrize("learns", [False, True])
def test_a_model_whose_distributions_the_loss_reads_is_on_the_device_during_the_update(learns: bool) -> None:
    architecture, run = read_architecture(published("llama-3-70b")), cast(Any, a_run())
    run.frozen_roles, run.model = frozenset({"reference"}), SimpleNamespace(frozen={})
    run.loss = _AnchoredConfig(name="anchored") if learns else PpoConfig(kl={"coefficient": 0.1})
    layouts = [layout_on(Grid(8, tensor=8), 4096).model_copy(update={"frozen": place}) for place in ("device", "host")]
    device, host = (estimate_fullest(layout, run, architecture, 4096, 8192).peak for layout in layouts)
    assert (host == device) is learns
    assert ({"frozen": "host"} not in savings(layouts[0], run, 4096, 8192)) is learns


@pytest.mark.parametrize(("pipeline", "virtual"), [(2, 2), (4, 5), (8, 3)])
def test_interleaved_stages_keep_what_korthikanti_says_and_megatron_does(pipeline: int, virtual: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    grid = Grid(pipeline, pipeline=pipeline, virtual_stages=virtual)
    for stage in range(pipeline):
        warmup = get_pp_rank_microbatches(
            8 * pipeline, virtual, pipeline, p2p_communicator=cast(Any, _Stage(pipeline, stage, virtual))
        )[2]
        assert microbatches_in_flight(grid, stage, 8 * pipeline) == (warmup + 1) / virtual
    assert microbatches_in_flight(grid, 0, 8 * pipeline) == pytest.approx(
        pipeline * (1 + (pipeline - 1) / (pipeline * virtual))
    )


class _Stage:
    """What the schedule asks of its communicator."""

    def __init__(self, pipeline: int, stage: int, virtual: int) -> None:
        self.virtual_pipeline_model_parallel_size = virtual
        self.pp_group = self
        self._sizes = pipeline, stage

    def size(self) -> int:
        return self._sizes[0]

    def rank(self) -> int:
        return self._sizes[1]


def test_a_layer_keeps_what_korthikanti_counts_but_for_the_gate_and_dropout() -> None:
    """Of GPT with four times as wide feed-forward layers, in units of tokens x hidden in bf16."""
    gpt = Architecture("gpt", 1, 64, 256, 4, 4, 16, 100, False, 1e-5)
    # 34 bytes there: 4 of norms, 2 of each matrix's input, 6 of queries, keys and values, 2 of results that the next
    # matrix reads, 16 of the feed-forward layer's activation, 2 of dropout. Here results are that matrix's very input,
    # turned queries and keys are kept beside the projection, and a gate makes five tensors of two.
    norms_and_inputs, attention, gated = 8, 6 + 4 + 2, 3 * 4 * 2
    assert (
        2 * kept_values(MegatronBackendConfig(ranks=1, device="cpu"), gpt)
        == (norms_and_inputs + attention + gated) * 64
    )


def measured(loaded: LoadedConfig, call: str, lengths: Sequence[int]) -> list[Any]:
    """What the ranks answer that measure themselves, on a batch of samples so long."""
    run, config = loaded.config, cast(MegatronBackendConfig, loaded.config.backend)
    objective = plain_objective(Objective(loaded.host.registry.create("loss", run.loss), 64.0))
    shares = deal(lay_out(make_samples(lengths)), config.layout().data).shares
    ranks = open_ranks(config.rank_request(), "megatron_measuring:MeasuringRank", (plain_run(run), 8), config.limits)
    try:
        wires = [shares[config.grid.place(rank).data].to_wire() for rank in range(config.num_ranks)]
        ranks.call("build")
        return ranks.call(call, objective, per_rank=wires)
    finally:
        ranks.close()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "settings", [{"tensor": 2}, {"precision": "bf16"}, {"expert": 2}, {"ranks": 1}, {"pipeline": 2}], ids=str
)
def test_weights_gradients_and_optimizer_are_what_a_plan_says(tmp_path: Path, settings: dict[str, Any]) -> None:
    wide = {"vocab_size": 515, "hidden_size": 256, "intermediate_size": 512}
    model = write_qwen3_moe(tmp_path) if "expert" in settings else write_llama3(tmp_path, **wide)
    loaded = backend_run(model, on(**{"ranks": 2, **settings}), ("megatron_backend",))
    answers: list[dict[str, int]] = measured(loaded, "allocated", [9, 21, 4, 33])
    fullest_rank = max(answers, key=lambda answer: sum(answer.values()))
    said = loaded.config.backend.estimate_memory(loaded.config, 33, 67).parts
    for part in ("weights", "gradients", "optimizer"):
        assert said[part] == pytest.approx(fullest_rank[part], rel=0.03), (part, said, fullest_rank)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (write_qwen3, {"ranks": 1}),
        (write_qwen3_moe, {"ranks": 2, "expert": 2}),
        (write_llama3, {"ranks": 1}),
        (write_llama3, {"ranks": 2, "tensor": 2}),
        (write_qwen3, {"ranks": 2, "context": 2}),
        (write_qwen3, {"ranks": 1, "recompute": "selective"}),
        (write_llama3, {"ranks": 1, "recompute": "selective"}),
        (write_llama3, {"ranks": 1, "recompute": "full"}),
    ],
)
def test_a_layer_keeps_for_its_backward_pass_what_a_plan_says(
    tmp_path: Path, write: Callable[..., Path], settings: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    tokens = 512
    kept: list[float] = []
    for layers in (2, 4):
        folder = tmp_path / str(layers)
        folder.mkdir()
        loaded = backend_run(write(folder, num_hidden_layers=layers, **sizes), on(**settings), ("megatron_backend",))
        data = loaded.config.backend.layout().data
        answers = measured(loaded, "kept", [128] * (tokens // 128 * data))
        # Experts get more or fewer tokens than their share: together the ranks compute all of them.
        kept.append(sum(answers) / len(answers))
    config = cast(MegatronBackendConfig, loaded.config.backend)
    of_layer = (kept[1] - kept[0]) / 2 / (tokens / config.context) / 4
    architecture = read_architecture(load_model_config(loaded.config.model))
    if config.recompute == "full":
        assert of_layer == pytest.approx(architecture.hidden, rel=0.01)
        return
    # On CPU a norm is no kernel of its own, and keeps its result without the weight too.
    heads = architecture.heads + architecture.key_value_heads if architecture.qk_norm else 0
    unfused = 2 * architecture.hidden / config.tensor + heads * architecture.head_dim / config.tensor
    assert kept_values(config, architecture) + unfused == pytest.approx(of_layer, rel=0.02)
