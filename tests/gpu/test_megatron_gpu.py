"""Megatron's ranks over NCCL compute what one GPU computes, within the memory that was planned, and their failures end
in errors.

What needs one GPU runs on one; the rest wants two, or four.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_layouts import LONG
from living_processes import living_below
from megatron_layouts import write_qwen3, write_qwen3_moe
from run_helpers import wait_for

from spurline.errors import RankFailedError
from spurline.protocols.backend import Backend
from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_models.dealing import deal
from spurline_models.testing import write_tiny_model
from spurline_ranks.group import open_ranks
from spurline_ranks.messages import plain_objective, plain_run
from spurline_rl.testing import BackendContract
from spurline_rl.testing.backend_cases import minibatch, values_batch, weights_of, without_times
from spurline_rl.testing.backend_runs import backend_run, opened

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
PLUGINS = ("megatron_backend",)
LOCAL = {"name": "models/local", "device": "cuda"}


def needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(gpus > NUM_GPUS, reason=f"needs {gpus} GPUs")


def on(ranks: int, **settings: Any) -> dict[str, Any]:
    limits = {"call_timeout_s": 300, "collective_timeout_s": 120}
    return {"name": "megatron", "device": "cuda", "precision": "fp32", "ranks": ranks, **limits, **settings}


def wide_model(folder: Path, **overrides: Any) -> Path:
    """Of four layers, with heads as attention kernels for half precision want them."""
    return write_qwen3(folder, num_hidden_layers=4, head_dim=16, **overrides)


class ContractOnGpus(BackendContract):
    """The gates of the CPU, against the local backend on one GPU."""

    plugins = PLUGINS
    dropout = 0.0
    keeps_open = True

    @contextmanager
    def local(self, model: Path, *, critic: bool = False) -> Iterator[Backend]:
        with opened(backend_run(model, LOCAL, critic=critic)) as (backend, _):
            yield backend

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_qwen3(tmp_path_factory.mktemp("four-layers"), num_hidden_layers=4)


class WithExperts(ContractOnGpus):
    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_qwen3_moe(tmp_path_factory.mktemp("experts"))


class TestOneRank(ContractOnGpus):
    backend_settings = on(1, deterministic=True)


class TestExpertsOfOneRank(WithExperts):
    backend_settings = on(1, deterministic=True)


@needs(2)
class TestTensorAndSequence(ContractOnGpus):
    backend_settings = on(2, deterministic=True, tensor=2)


@needs(2)
class TestPipeline(ContractOnGpus):
    backend_settings = on(2, deterministic=True, pipeline=2, max_tokens_per_microbatch=40)


@needs(2)
class TestInterleavedPipeline(ContractOnGpus):
    backend_settings = on(2, deterministic=True, pipeline=2, virtual_stages=2, max_tokens_per_microbatch=40)


@needs(2)
class TestContext(ContractOnGpus):
    backend_settings = on(2, deterministic=True, context=2)


@needs(2)
class TestExperts(WithExperts):
    backend_settings = on(2, deterministic=True, expert=2)


@needs(2)
class TestExpertsAndTensor(WithExperts):
    backend_settings = on(2, deterministic=True, tensor=2, expert=2)


@needs(2)
class TestDividedExperts(WithExperts):
    backend_settings = on(2, deterministic=True, tensor=2, expert_tensor=2)


@needs(4)
class TestTensorAndPipeline(ContractOnGpus):
    backend_settings = on(4, deterministic=True, tensor=2, pipeline=2, max_tokens_per_microbatch=40)


@needs(4)
class TestFourStages(ContractOnGpus):
    """In which a stage has another neighbour on each side, with whom it exchanges in turns."""

    backend_settings = on(4, deterministic=True, pipeline=4, max_tokens_per_microbatch=40)


LAYOUTS = [
    pytest.param({"ranks": 1}, id="alone"),
    pytest.param({"ranks": 1, "recompute": "full"}, id="recomputing"),
    pytest.param({"ranks": 2, "tensor": 2}, id="tensor", marks=needs(2)),
    pytest.param({"ranks": 2, "pipeline": 2}, id="pipeline", marks=needs(2)),
    pytest.param({"ranks": 2, "pipeline": 2, "virtual_stages": 2}, id="interleaved", marks=needs(2)),
    pytest.param({"ranks": 2, "context": 2}, id="context", marks=needs(2)),
    pytest.param({"ranks": 2, "max_tokens_per_microbatch": 40}, id="data", marks=needs(2)),
    pytest.param({"ranks": 4, "tensor": 2, "pipeline": 2}, id="tensor-pipeline", marks=needs(4)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_steps_stay_near_those_of_one_gpu_in_bf16(layout: dict[str, Any], tmp_path: Path) -> None:
    model = wide_model(tmp_path / "model")
    run = backend_run(model, on(**layout, precision="bf16"), PLUGINS, critic=True)
    alone = backend_run(model, {**LOCAL, "precision": "bf16"}, critic=True)
    exact = backend_run(model, LOCAL)
    with opened(run) as (backend, parallel), opened(alone) as (local, _), opened(exact) as (reference, _):
        batch, _ = minibatch("packed", parallel)
        # Weights are rounded too, not only what is computed with them.
        got, wanted = (one.logprobs(batch) - reference.logprobs(batch) for one in (backend, local))
        assert 0 < float(got.abs().mean()) <= 2 * float(wanted.abs().mean()) + 1e-3
        for step in range(4):
            found, expected = (one.update(*minibatch("packed", parallel, step)) for one in (backend, local))
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
        for step in range(2):
            found, expected = (one.update(*values_batch(parallel, step), role="critic") for one in (backend, local))
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-2)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_reference_in_bf16_is_the_policy_before_training_over_long_rows(
    layout: dict[str, Any], place: str, tmp_path: Path
) -> None:
    settings = on(**layout, precision="bf16", deterministic=True, reference=place)
    with opened(backend_run(wide_model(tmp_path / "model"), settings, PLUGINS)) as (backend, parallel):
        batch, objective = minibatch("padded", parallel, lengths=LONG)
        before = backend.logprobs(batch)
        assert torch.equal(backend.logprobs(batch, "reference"), before)
        backend.update(batch, objective)
        # Brought from where it lies a second time.
        assert torch.equal(backend.logprobs(batch, "reference"), before)
        assert not torch.equal(backend.logprobs(batch), before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", [wide_model, write_qwen3_moe], ids=["dense", "experts"])
def test_bf16_runs_are_equal_bit_for_bit_and_go_on_so_from_a_checkpoint(
    layout: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    if write is write_qwen3_moe and layout.get("virtual_stages", 1) > 1:
        pytest.skip("the model has two layers, and four parts have one each")
    settings = on(**layout, precision="bf16", deterministic=True)
    run = backend_run(write(tmp_path / "model"), settings, PLUGINS)
    saved = tmp_path / "saved"
    saved.mkdir()
    results = []
    for resumed in (False, True):
        with opened(run) as (backend, parallel):
            if resumed:
                backend.load(saved)
            else:
                backend.update(*minibatch("packed", parallel, 0))
                backend.save(saved)
            metrics = [without_times(backend.update(*minibatch("packed", parallel, step))) for step in (1, 2)]
            results.append((metrics, weights_of(backend)))
    assert results[1][0] == results[0][0]
    assert all(torch.equal(results[1][1][name], value) for name, value in results[0][1].items())


@needs(2)
@pytest.mark.parametrize("how", ["kill", "sleep"])
@pytest.mark.parametrize("divided", ["tensor", "pipeline"])
def test_a_rank_that_dies_or_stands_still_in_an_update_ends_those_that_wait_for_it(
    spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch, divided: str, how: str
) -> None:
    monkeypatch.setenv("FAILING_RANK", f"1:{how}")
    monkeypatch.setattr(MegatronBackendConfig, "worker", "megatron_ranks:fails")
    settings = on(2, **{divided: 2}, start_timeout_s=300) | {"call_timeout_s": 20, "collective_timeout_s": 60}
    with opened(backend_run(spurline_tiny_model, settings, PLUGINS)) as (backend, layout):
        ranks = living_below(os.getpid(), "spurline_ranks.rank_main")
        for step in range(2):
            backend.update(*minibatch("packed", layout, step))
        started = time.monotonic()
        with pytest.raises(RankFailedError, match=r"[Rr]ank 1"):
            backend.update(*minibatch("packed", layout, 2))
        assert time.monotonic() - started < (5 if how == "kill" else 40)
        wait_for(lambda: not any(process.is_running() for process in ranks), "the end of all ranks", 10)


MEASURED = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
}


def measured(
    model: Path, settings: dict[str, Any], lengths: tuple[int, ...], calls: int, call: str
) -> tuple[list[Any], int]:
    """What the ranks answer to the last of so many calls, on rows so long; bytes that a plan says."""
    run = backend_run(model, settings, PLUGINS).config
    config = MegatronBackendConfig.model_validate(settings)
    batch, objective = minibatch("padded", config.layout(), lengths=lengths)
    shares = deal(batch, config.layout().data).shares
    wires = [shares[config.grid.place(rank).data].to_wire() for rank in range(config.num_ranks)]
    worker = "megatron_measuring:MeasuringRank"
    group = open_ranks(config.rank_request(), worker, (plain_run(run), 8), config.limits)
    try:
        group.call("build")
        answers = [group.call(call, plain_objective(objective), per_rank=wires) for _ in range(calls)][-1]
    finally:
        group.close()
    return answers, config.estimate_memory(run, max(lengths), sum(lengths)).peak


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_peak_of_an_update_is_what_a_plan_says(tmp_path: Path, layout: dict[str, Any], recompute: str) -> None:
    model = write_tiny_model(tmp_path, **MEASURED)
    limit = {} if layout.get("pipeline", 1) == 1 else {"max_tokens_per_microbatch": 8000}
    settings = on(**{**layout, "recompute": recompute, **limit}, precision="bf16")
    # The second update has the optimizer's state from its beginning.
    peaks, said = measured(model, settings, (8000,) * layout["ranks"], 2, "peak")
    assert said == pytest.approx(max(peaks), rel=0.15, abs=64 * MIB)


def test_half_precision_computes_attention_by_the_kernel_for_segments_and_compiles_nothing(tmp_path: Path) -> None:
    settings = on(1, precision="bf16")
    [operators], _ = measured(wide_model(tmp_path / "model"), settings, (24, 40, 9), 1, "operators")
    assert any("varlen_attn" in name for name in operators), operators
    assert not any("scaled_dot_product" in name for name in operators), operators
    [operators], _ = measured(write_qwen3_moe(tmp_path / "experts"), settings, (24, 40, 9), 1, "operators")
    assert not any("TorchDynamo" in name or "Torch-Compiled" in name for name in operators), operators
    assert any("grouped_mm" in name for name in operators), operators
