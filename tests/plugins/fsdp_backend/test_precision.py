"""What bf16 keeps, what dropout draws, frozen parts, and models that packed or long rows are not exact for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_layouts import LONG, on
from model_families import family_of, tiny_model

from spurline.config.loading import LoadedConfig
from spurline.errors import DataError, ModelError
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_fsdp_backend.trained_model import read_weights
from spurline_models.testing import write_tiny_model
from spurline_rl.testing.backend_cases import assert_gradients_close, minibatch, uneven_batch, weights_of, with_dropout
from spurline_rl.testing.backend_runs import KeptBackends, backend_run, opened

pytestmark = pytest.mark.processes


def norm(gradients: Any) -> float:
    return float(torch.stack([value.double().norm() for _, value in gradients]).norm())


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptBackends]:
    kept = KeptBackends()
    yield kept
    kept.close()


def test_the_reference_in_bf16_is_the_policy_before_training_over_long_rows(
    kept: KeptBackends, spurline_tiny_model: Path
) -> None:
    run = backend_run(spurline_tiny_model, on(2, precision="bf16"), ("fsdp_backend",), critic=True)
    with kept.lend(run) as (backend, layout):
        batch, objective = minibatch("padded", layout, lengths=LONG)
        reference = backend.logprobs(batch, "reference")
        assert torch.equal(reference, backend.logprobs(batch))
        backend.update(batch, objective)
        backend.update(batch, objective)
        assert not torch.equal(reference, backend.logprobs(batch))
        assert torch.equal(reference, backend.logprobs(batch, "reference"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="the extra fp8 is not installed")
def test_gradients_in_fp8_are_those_of_the_local_backend_in_fp8_on_any_number_of_ranks(
    kept: KeptBackends, spurline_tiny_model: Path
) -> None:
    local_run = backend_run(spurline_tiny_model, {"name": "models/local", "device": "cpu", "fp8": "emulated"})
    exact_run = backend_run(spurline_tiny_model, {"name": "models/local", "device": "cpu"})
    run = backend_run(spurline_tiny_model, on(2, fp8="emulated", probe=True), ("fsdp_backend",))
    with kept.lend(run) as (backend, layout), opened(local_run) as (local, _), opened(exact_run) as (exact, _):
        wanted = dict(local.gradients(*minibatch("packed", layout)))
        assert_gradients_close(backend.gradients(*minibatch("packed", layout)), wanted.items(), 1e-4)
        plain = dict(exact.gradients(*minibatch("packed", layout)))
        assert max(float((plain[name] - value).norm() / plain[name].norm()) for name, value in wanted.items()) > 1e-3


def test_dropout_follows_from_the_number_of_the_update_and_gradients_show_the_next_one(
    spurline_tiny_model: Path, tmp_path: Path
) -> None:
    def change_by_an_update_without_loss(backend: Backend, layout: ParallelLayout) -> float:
        batch, objective = minibatch("packed", layout)
        before = dict(backend.gradients(batch, objective))
        again = dict(backend.gradients(batch, objective))
        assert all(torch.equal(again[name], value) for name, value in before.items())
        # Its gradients are 0: weights hardly move, by their decay, and what dropout draws is the next update's.
        backend.update(*uneven_batch("no loss", layout))
        after = dict(backend.gradients(batch, objective))
        assert backend.update(batch, objective)["grad_norm"] == pytest.approx(norm(after.items()), rel=1e-5)
        return norm([(name, after[name] - value) for name, value in before.items()]) / norm(before.items())

    changes = []
    for dropout in (0.0, 0.2):
        model = with_dropout(spurline_tiny_model, tmp_path, dropout)
        with opened(backend_run(model, on(2), ("fsdp_backend",))) as (backend, layout):
            changes.append(change_by_an_update_without_loss(backend, layout))
    assert changes[0] < 0.01
    assert changes[1] > 0.05


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "qwen3_5_text"])
def test_caps_sinks_and_rows_of_models_that_mix_tokens_are_those_of_the_local_backend(
    model_type: str, tmp_path: Path
) -> None:
    tiny_model(family_of(model_type)).save_pretrained(tmp_path)
    local_run = backend_run(tmp_path, {"name": "models/local", "device": "cpu"})
    with opened(backend_run(tmp_path, on(2), ("fsdp_backend",))) as (backend, layout), opened(local_run) as (local, _):
        # A rank without rows, or with rows of fewer lengths, runs the model as often as the others.
        uneven = minibatch("padded", layout, lengths=(200, 3, 240))
        for batch, objective in (minibatch("packed", layout), uneven_batch("one row", layout), uneven):
            wanted = local.gradients(batch, objective)
            assert_gradients_close(backend.gradients(batch, objective), wanted, 1e-5, cancels_below=1e-3)


def test_sequences_of_a_model_that_mixes_tokens_are_not_shared_among_ranks(tmp_path: Path) -> None:
    tiny_model(family_of("qwen3_5_text")).save_pretrained(tmp_path)
    with (
        pytest.raises(ModelError, match=r"reads a row for each sequence.*Set backend\.context: 1"),
        opened(backend_run(tmp_path, on(2, context=2), ("fsdp_backend",))),
    ):
        pass


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def test_ranks_stay_after_a_sample_that_is_too_long(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", rope_parameters=DYNAMIC, max_position_embeddings=16)
    loaded = backend_run(model, on(2, probe=False), ("fsdp_backend",))
    data = loaded.config.data.model_copy(update={"max_length": 16})
    loaded = replace(loaded, config=loaded.config.model_copy(update={"data": data}))
    with opened(loaded) as (backend, layout):
        for call in (backend.update, backend.gradients, backend.evaluate):
            with pytest.raises(DataError, match=r"17 tokens.*'dynamic'.*16"):
                call(*minibatch("packed", layout, lengths=(3, 17, 5, 9)))
        assert backend.update(*minibatch("packed", layout, lengths=(3, 16, 5, 9)))["tokens"] == 33


FROZEN = ("*embed_tokens*", "model.layers.0.*", "*norm*", "*up_proj*")
"""A whole layer and what is before it, and parts of the other one."""


def frozen_run(model: Path, settings: dict[str, Any]) -> LoadedConfig:
    loaded = backend_run(model, settings, ("fsdp_backend",))
    section = loaded.config.model.model_copy(update={"freeze": FROZEN})
    return replace(loaded, config=loaded.config.model_copy(update={"model": section}))


def test_frozen_parts_of_shards_are_those_of_one_process(spurline_tiny_model: Path, tmp_path: Path) -> None:
    with (
        opened(frozen_run(spurline_tiny_model, on(2))) as (backend, layout),
        opened(frozen_run(spurline_tiny_model, {"name": "models/local", "device": "cpu"})) as (local, _),
    ):
        assert {**backend.facts(), "device": ""} == {**local.facts(), "device": ""}
        initial = weights_of(backend)
        for step in range(2):
            batch, objective = minibatch("padded", layout, step)
            found, expected = (one.update(batch, objective) for one in (backend, local))
            for name in ("loss", "grad_norm"):
                assert found[name] == pytest.approx(expected[name], rel=1e-5), (step, name)
        assert_gradients_close(backend.gradients(batch, objective), local.gradients(batch, objective), 1e-5)
        changed = {name for name, value in weights_of(backend).items() if not torch.equal(value, initial[name])}
        assert changed == {name for name, _ in local.gradients(batch, objective)}
        backend.save(tmp_path)
        backend.update(batch, objective)
        expected_weights = weights_of(backend)
        backend.load(tmp_path)
        backend.update(batch, objective)
        assert all(torch.equal(value, expected_weights[name]) for name, value in weights_of(backend).items())
        run = frozen_run(spurline_tiny_model, on(2)).config
        read = dict(read_weights(run, tmp_path, {}).tensors)
        backend.load(tmp_path)
        assert all(torch.equal(value, read[name]) for name, value in weights_of(backend).items())
