"""Ranks of eight and more GPUs exchange what docs/many-gpus.md and docs/megatron.md say: counted in one rank alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import lone_rank
import pytest
from lone_rank import Exchange

from spurline_models.weight_files import slices_of

pytestmark = pytest.mark.processes

GATHER, SUM_PARTS, SUM, SWAP = "_allgather_base_", "_reduce_scatter_base_", "allreduce_", "alltoall_base_"
BF16, FP32, FP64 = "torch.bfloat16", "torch.float32", "torch.float64"
LAYERS = 2
BACKENDS: Mapping[str, dict[str, Any]] = {
    "fsdp": {"name": "fsdp", "ranks": 8, "max_tokens_per_microbatch": 128},
    "replicas": {"name": "fsdp", "ranks": 16, "replicas": 2, "max_tokens_per_microbatch": 64},
    "context": {"name": "fsdp", "ranks": 8, "context": 4, "max_tokens_per_microbatch": 512},
    "megatron": {"name": "megatron", "ranks": 8, "tensor": 2, "max_tokens_per_microbatch": 256},
}
"""Layouts in which each rank has two micro-batches."""


@pytest.fixture(scope="module")
def steps(spurline_tiny_model: Path) -> Mapping[str, list[Exchange]]:
    asked = [json.dumps({"precision": "bf16", **backend}) for backend in BACKENDS.values()]
    command = [sys.executable, lone_rank.__file__, str(spurline_tiny_model), *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [Exchange(*one) for one in step] for name, step in zip(BACKENDS, found, strict=True)}


@pytest.fixture(scope="module")
def sizes(spurline_tiny_model: Path) -> tuple[int, int]:
    """The number of parameters in layers, and of all others."""
    files = slices_of([*spurline_tiny_model.glob("*.safetensors")])
    counts = {name: prod(file.get_shape()) for name, file in files.items()}
    layers = sum(count for name, count in counts.items() if ".layers." in name)
    return layers, sum(counts.values()) - layers


def of(step: list[Exchange], microbatch: int, ranks: int) -> list[Exchange]:
    return [one for one in step if one.work == f"micro-batch {microbatch} of 2" and one.ranks == ranks]


@pytest.mark.parametrize("layout", ["fsdp", "replicas", "context"])
def test_each_micro_batch_gathers_layers_twice_in_bf16_and_sums_gradients_once_in_fp32(
    steps: Mapping[str, list[Exchange]], sizes: tuple[int, int], layout: str
) -> None:
    layers, others = sizes
    for microbatch in (1, 2):
        found = of(steps[layout], microbatch, 8)
        # Forward: embedding and output layer, which stay, and each layer. Backward: each layer, then its gradients.
        gathers = [one for one in found if one.operation == GATHER]
        sums = [one for one in found if one.operation == SUM_PARTS]
        assert len(found) == len(gathers) + len(sums)
        assert found[: 1 + LAYERS] == gathers[: 1 + LAYERS]
        assert found[-1] == sums[-1]
        assert (len(gathers), len(sums)) == (1 + 2 * LAYERS, 1 + LAYERS)
        assert {one.dtype for one in gathers} == {BF16}
        assert {one.dtype for one in sums} == {FP32}
        # Rows are padded to a multiple of the ranks.
        assert sum(one.num_bytes for one in gathers) == pytest.approx(2 * (2 * layers + others), rel=0.02)
        assert sum(one.num_bytes for one in sums) == pytest.approx(4 * (layers + others), rel=0.02)


def test_nothing_else_crosses_ranks_in_a_step_than_the_norm_and_loss(steps: Mapping[str, list[Exchange]]) -> None:
    for layout in ("fsdp", "replicas", "context"):
        assert [one for one in steps[layout] if not one.work.startswith("micro-batch")] == [
            Exchange("joining the gradient norm of all ranks", SUM, BACKENDS[layout]["ranks"], FP64, 16)
        ]
    assert len(steps["fsdp"]) == 2 * (2 + 3 * LAYERS) + 1


def test_copies_of_the_model_sum_their_gradients_once_in_a_step(
    steps: Mapping[str, list[Exchange]], sizes: tuple[int, int]
) -> None:
    assert of(steps["replicas"], 1, 2) == []
    sums = of(steps["replicas"], 2, 2)
    assert {(one.operation, one.dtype) for one in sums} == {(SUM, FP32)}
    assert sum(one.num_bytes for one in sums) == pytest.approx(4 * sum(sizes) / 8, rel=0.02)


def test_ranks_that_share_sequences_swap_four_tensors_in_a_layer_forward_and_backward(
    steps: Mapping[str, list[Exchange]],
) -> None:
    for microbatch in (1, 2):
        found = [(one.operation, one.dtype) for one in of(steps["context"], microbatch, 4)]
        assert sorted(found) == sorted([(SWAP, BF16)] * 8 * LAYERS + [(SUM, FP32)])


def test_megatron_sums_gradients_and_gathers_weights_once_in_a_step(
    steps: Mapping[str, list[Exchange]], sizes: tuple[int, int]
) -> None:
    """The ranks of a tensor group exchange activations in bf16 alone, and few logprobs in fp32."""
    step, held = steps["megatron"], sum(sizes) / 2
    inside = [one for one in step if one.ranks == 2]
    assert {one.dtype for one in inside if one.operation in (GATHER, SUM_PARTS)} == {BF16}
    others = [one for one in step if one.ranks != 2]
    assert [(one.work, one.operation, one.ranks, one.dtype) for one in others] == [
        ("micro-batch 2 of 2", "reduce_scatter_tensor_coalesced_", 4, FP32),
        ("joining the gradient norm of all ranks", SUM, 8, FP64),
        ("the optimizer's step", "allgather_into_tensor_coalesced_", 4, BF16),
    ]
    assert others[0].num_bytes == pytest.approx(4 * held, rel=0.03)
    assert others[2].num_bytes == pytest.approx(2 * held, rel=0.03)
