"""Weights of Megatron's ranks reach engines as files have them, without ever coming to the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weight_takers import Taker, assert_published_again_and_again, make_sync, update_and_publish

from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_rl.testing.backend_cases import assert_weights_equal, minibatch, weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

Opened = tuple[Any, Any]
ON_TWO = {"name": "megatron", "ranks": 2, "device": "cpu", "num_threads": 1}


@pytest.fixture(scope="module")
def ranks(spurline_tiny_model: Path) -> Iterator[Opened]:
    run = backend_run(spurline_tiny_model, {**ON_TWO, "tensor": 2}, ("megatron_backend",))
    with opened(run) as lent:
        yield lent


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_engines_get_the_weights_of_now_again_and_again_and_the_controller_none_of_them(
    ranks: Opened, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_published_again_and_again(ranks, transport, tmp_path, monkeypatch)


def with_experts(folder: Path) -> Path:
    return write_tiny_moe_model(folder)


def tied(folder: Path) -> Path:
    return write_tiny_model(folder, tie_word_embeddings=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "layout"),
    [(tied, {"pipeline": 2}), (with_experts, {"expert": 2}), (with_experts, {"tensor": 2, "expert_tensor": 2})],
    ids=["tied-stages", "experts", "divided-experts"],
)
def test_engines_get_the_weights_of_stages_and_experts_under_the_names_of_files(
    write: Callable[[Path], Path], layout: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "model")
    sync, taker = make_sync("shared_memory", tmp_path), Taker()
    run = backend_run(model, {**ON_TWO, **layout}, ("megatron_backend",))
    with opened(run) as (backend, asked), closing(sync):
        asyncio.run(sync.publish(1, backend, [taker]))
        assert_weights_equal(taker.taken, load_file(model / "model.safetensors"))
        update_and_publish(backend, asked, sync, taker, 2, monkeypatch)
        assert backend.update(*minibatch("packed", asked))["grad_norm"] > 0


@pytest.mark.parametrize(
    ("write", "layout"),
    [
        (write_tiny_model, {}),
        pytest.param(tied, {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param(with_experts, {"tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=["data", "tied-stages", "experts"],
)
def test_files_hold_the_exact_weights_of_a_run_in_half_precision_and_engines_get_them_rounded(
    write: Callable[[Path], Path], layout: dict[str, int], tmp_path: Path
) -> None:
    model = write(tmp_path / "model")
    run = backend_run(model, {**ON_TWO, **layout, "precision": "bf16"}, ("megatron_backend",))
    sync, taker = make_sync("shared_memory", tmp_path), Taker()
    with opened(run) as (backend, asked), closing(sync):
        before = weights_of(backend)
        assert_weights_equal(before, load_file(model / "model.safetensors"))
        backend.update(*minibatch("packed", asked))
        after = weights_of(backend)
        assert any(not torch.equal(after[name], value.bfloat16().float()) for name, value in after.items())
        assert all(not torch.equal(after[name], value) for name, value in before.items())
        backend.write_weights(tmp_path, torch.float32, 1 << 30)
        assert_weights_equal(load_file(tmp_path / "model.safetensors"), after)
        asyncio.run(sync.publish(1, backend, [taker]))
        assert_weights_equal(taker.taken, {name: value.bfloat16() for name, value in after.items()})
        backend.yield_device(keep_weights=True)
        assert_weights_equal(weights_of(backend), after)
        backend.take_device()
        # What was shown of them meanwhile was on the host.
        assert_weights_equal(weights_of(backend), after)
