"""Losses of all kinds, and sequences that ranks share, have the gradients of the local backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_cases import LOSSES, LossGradients
from megatron_layouts import on, write_llama3, write_qwen3

from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline_rl.losses.algorithms import Gspo
from spurline_rl.losses.configs import GspoConfig
from spurline_rl.testing.backend_cases import assert_gradients_close, minibatch, with_noisy_columns
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

Pair = tuple[Backend, Backend, ParallelLayout]

SHORT = (2,)
"""One sequence of fewer tokens than there are ranks."""


def open_pair(model: Path, *, critic: bool = False, **settings: Any) -> Iterator[Pair]:
    shared = backend_run(model, on(**settings), ("megatron_backend",), critic=critic)
    alone = backend_run(model, {"name": "models/local", "device": "cpu"}, ("megatron_backend",), critic=critic)
    with opened(shared) as (backend, layout), opened(alone) as (local, _):
        yield backend, local, layout


def assert_same(pair: Pair, lengths: tuple[int, ...] | None = None) -> None:
    shared, local, layout = pair
    batch, objective = minibatch("packed", layout, **({} if lengths is None else {"lengths": lengths}))
    assert_gradients_close(shared.gradients(batch, objective), local.gradients(batch, objective), 1e-5)
    assert shared.evaluate(batch, objective).loss == pytest.approx(local.evaluate(batch, objective).loss, rel=1e-6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Micro-batches so short that some leave a rank without loss, and chunks of logits shorter than those."""
    model = write_llama3(tmp_path_factory.mktemp("model"))
    yield from open_pair(
        model, critic=True, ranks=4, tensor=2, context=2, max_tokens_per_microbatch=24, logits_chunk_tokens=5
    )


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
    assert_same(pair, SHORT)


@pytest.mark.slow
def test_more_ranks_than_key_heads_repeat_them(tmp_path: Path) -> None:
    for pair in open_pair(write_qwen3(tmp_path / "model"), ranks=4, context=4):
        assert_same(pair)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_stages_that_take_turns_send_parts_of_streams_of_one_length(tmp_path: Path, recompute: str) -> None:
    model = write_qwen3(tmp_path / "model", num_hidden_layers=4)
    layout = {"pipeline": 2, "virtual_stages": 2, "context": 2, "recompute": recompute}
    for pair in open_pair(model, ranks=4, max_tokens_per_microbatch=24, **layout):
        assert_same(pair)
        assert_same(pair, SHORT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wanted(model: Path) -> Iterator[LossGradients]:
    with opened(backend_run(model, {"name": "models/local", "device": "cpu", "probe": False})) as (backend, _):
        yield LossGradients(backend)


@pytest.fixture(
    scope="module",
    params=[
        {"ranks": 2, "tensor": 2},
        pytest.param({"ranks": 2, "pipeline": 2, "max_tokens_per_microbatch": 48}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def ranks(request: pytest.FixtureRequest, model: Path) -> Iterator[Backend]:
    settings: dict[str, Any] = request.param
    with opened(backend_run(model, on(**settings, probe=False), ("megatron_backend",))) as (backend, _):
        yield backend


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_the_gradient_of_the_local_backend(name: str, ranks: Backend, wanted: LossGradients) -> None:
    wanted.assert_equal_those_of(ranks, name)
