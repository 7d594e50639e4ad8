"""Ranks give every loss the gradient of one process, share sequences like one process, and stay near it in bf16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsdp_layouts
import megatron_layouts
import pytest
import torch
from loss_cases import CORRECTIONS, LOSSES, REGISTRY, LossGradients
from megatron_layouts import write_llama3, write_qwen3, write_qwen3_moe

from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline_rl.losses.algorithms import Gspo
from spurline_rl.losses.configs import GspoConfig
from spurline_rl.testing.backend_cases import assert_gradients_close, minibatch, values_batch, with_noisy_columns
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

PLUGINS = ("fsdp_backend", "megatron_backend", "objectives", "distillation", "reward_models")
LOCAL = {"name": "models/local", "device": "cpu"}
fsdp, megatron, soak = fsdp_layouts.on, megatron_layouts.on, pytest.mark.slow
Pair = tuple[Backend, Backend, ParallelLayout]

SHORT = (2,)
"""One sequence of fewer tokens than there are ranks."""


@contextmanager
def pair_of(model: Path, settings: dict[str, Any], *, critic: bool = False, precision: str = "fp32") -> Iterator[Pair]:
    many = backend_run(model, {**settings, "precision": precision}, PLUGINS, critic=critic)
    one = backend_run(model, {**LOCAL, "precision": precision}, PLUGINS, critic=critic)
    with opened(many) as (backend, layout), opened(one) as (local, _):
        yield backend, local, layout


def assert_same(pair: Pair, **lengths: Any) -> None:
    ranks, local, layout = pair
    batch, objective = minibatch("packed", layout, **lengths)
    assert_gradients_close(ranks.gradients(batch, objective), local.gradients(batch, objective), 1e-5)
    assert ranks.evaluate(batch, objective).loss == pytest.approx(local.evaluate(batch, objective).loss, rel=1e-6)


def test_no_loss_and_no_correction_of_core_is_left_out() -> None:
    for kind, listed in (("loss", LOSSES), ("correction", CORRECTIONS)):
        assert {entry.name for entry in REGISTRY.entries() if entry.kind == kind} == {
            each.partition(":")[0] for each in listed
        }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def frozen(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A teacher of another size, with unused tokens at the end of its vocabulary."""
    tokens = json.loads((tiny / "config.json").read_text(encoding="utf-8"))["vocab_size"] + 5
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": tokens}
    return {"teacher": {"path": str(write_qwen3(tmp_path_factory.mktemp("teacher"), seed=7, **sizes))}}


@pytest.fixture(scope="module")
def wanted(tiny: Path, frozen: dict[str, Any]) -> Iterator[LossGradients]:
    with opened(backend_run(tiny, {**LOCAL, "probe": False}, PLUGINS, frozen=frozen)) as (backend, _):
        yield LossGradients(backend)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(fsdp(1), marks=soak),
        fsdp(2),
        # One rank has nothing to do in the last micro-batch.
        fsdp(3, max_tokens_per_microbatch=48),
        megatron(2, tensor=2),
        pytest.param(megatron(2, pipeline=2, max_tokens_per_microbatch=48), marks=soak),
        pytest.param(megatron(2, context=2), marks=soak),
        pytest.param(megatron(4, tensor=2, pipeline=2), marks=soak),
    ],
    ids=["fsdp-1", "fsdp-2", "fsdp-3", "tensor", "pipeline", "context", "tensor-pipeline"],
)
def ranks(request: pytest.FixtureRequest, tiny: Path, frozen: dict[str, Any]) -> Iterator[Backend]:
    with opened(backend_run(tiny, {**request.param, "probe": False}, PLUGINS, frozen=frozen)) as (backend, _):
        yield backend


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_the_gradient_of_the_local_backend(name: str, ranks: Backend, wanted: LossGradients) -> None:
    wanted.assert_equal_those_of(ranks, name)


def write_windowed(folder: Path) -> Path:
    """Layers alternate between full attention and a window that the sequences are longer than."""
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    return write_qwen3(folder, **window, layer_types=["full_attention", "sliding_attention"])


@pytest.fixture(scope="module", params=["fsdp", "megatron"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Micro-batches so short that some leave a rank without loss, and chunks of logits shorter than those."""
    folder, cut = tmp_path_factory.mktemp("model"), {"max_tokens_per_microbatch": 24, "logits_chunk_tokens": 5}
    model, settings = {
        "fsdp": (write_windowed, fsdp(2, context=2, **cut)),
        "megatron": (write_llama3, megatron(4, tensor=2, context=2, **cut)),
    }[request.param]
    with pair_of(model(folder), settings, critic=True) as pair:
        yield pair


def test_a_loss_on_whole_sequences_with_entropy_gives_the_gradients_of_one_process(pair: Pair) -> None:
    shared, local, layout = pair
    batch = with_noisy_columns(minibatch("packed", layout)[0])
    objective = Objective(Gspo(GspoConfig(entropy_coefficient=0.1)), 40.0, 0.7)
    assert_gradients_close(shared.gradients(batch, objective), local.gradients(batch, objective), 1e-5)
    got, wanted = shared.update(batch, objective), local.update(batch, objective)
    for name in ("loss", "grad_norm"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-6), name
    for name in ("policy/entropy", "policy/sequence_ratio/max", "policy/sequence_ratio"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert got["loss_tokens"] == wanted["loss_tokens"]


def test_logprobs_and_values_of_shared_sequences_come_back_once_for_each_row(pair: Pair) -> None:
    shared, local, layout = pair
    batch, _ = minibatch("padded", layout)
    for role in ("policy", "critic"):
        torch.testing.assert_close(shared.logprobs(batch, role), local.logprobs(batch, role), rtol=1e-5, atol=1e-5)


def test_ranks_share_a_stream_of_fewer_tokens_than_there_are_ranks(pair: Pair) -> None:
    assert_same(pair, lengths=SHORT)


@pytest.mark.parametrize(
    "settings", [fsdp(4, context=4), pytest.param(megatron(4, context=4), marks=soak)], ids=["fsdp", "megatron"]
)
def test_more_ranks_than_key_heads_repeat_them(tiny: Path, settings: dict[str, Any]) -> None:
    with pair_of(tiny, settings) as pair:
        assert_same(pair)


@pytest.mark.slow
def test_ranks_that_share_sequences_divide_experts_too(tmp_path: Path) -> None:
    with pair_of(write_qwen3_moe(tmp_path), fsdp(4, context=2, expert=2)) as pair:
        assert_same(pair)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_stages_that_take_turns_send_parts_of_streams_of_one_length(tmp_path: Path, recompute: str) -> None:
    layout = {"pipeline": 2, "virtual_stages": 2, "context": 2, "max_tokens_per_microbatch": 24}
    with pair_of(write_qwen3(tmp_path, num_hidden_layers=4), megatron(4, **layout, recompute=recompute)) as pair:
        assert_same(pair)
        assert_same(pair, lengths=SHORT)


@pytest.mark.parametrize(
    "settings",
    [
        fsdp(2),
        megatron(2, tensor=2),
        pytest.param(megatron(2, pipeline=2), marks=soak),
        pytest.param(megatron(2, context=2), marks=soak),
        pytest.param(megatron(2, max_tokens_per_microbatch=40), marks=soak),
    ],
    ids=["fsdp", "tensor", "pipeline", "context", "data"],
)
def test_bf16_steps_stay_near_those_of_the_local_backend_in_bf16(tiny: Path, settings: dict[str, Any]) -> None:
    exact_run = backend_run(tiny, LOCAL)
    with pair_of(tiny, settings, critic=True, precision="bf16") as pair, opened(exact_run) as (exact, _):
        backend, local, layout = pair
        batch, objective = minibatch("packed", layout)
        assert abs(backend.evaluate(batch, objective).loss / exact.evaluate(batch, objective).loss - 1) > 1e-6
        assert {value.dtype for _, value in backend.named_weights()} == {torch.float32}
        # The reference has no weights in fp32.
        reference = backend.logprobs(batch, "reference")
        assert torch.equal(reference, backend.logprobs(batch))
        for step in range(3):
            got, wanted = (one.update(*minibatch("packed", layout, step)) for one in (backend, local))
            assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
            assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-2)
        for step in range(2):
            # The value head begins with 0, so only the second step has a gradient below it.
            got, wanted = (one.update(*values_batch(layout, step), role="critic") for one in (backend, local))
            assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
        assert torch.equal(reference, backend.logprobs(batch, "reference"))
        assert not torch.equal(reference, backend.logprobs(batch))
