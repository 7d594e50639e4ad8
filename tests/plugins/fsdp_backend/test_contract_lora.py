"""Adapters on sharded frozen weights train as they do in the local backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from adapter_contract import AdapterContract
from fsdp_layouts import LONG, in_bf16, on
from safetensors.torch import load_file

from spurline.protocols.backend import Backend, Role
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline_models.testing import write_tiny_model, write_tiny_moe_model
from spurline_rl.testing import BackendContract
from spurline_rl.testing.backend_cases import (
    assert_critics_close,
    assert_gradients_close,
    minibatch,
    values_batch,
    without_times,
)
from spurline_rl.testing.backend_runs import KeptBackends, backend_run, opened

ADAPTERS = {"rank": 4, "alpha": 8.0}
ROLES: tuple[Role, ...] = ("policy", "reference", "critic")
IN_SHORT = (
    "loss_and_gradient_norm",
    "gradients_equal",
    "the_reference_is",
    "hugging_face_names",
    "generates",
    "facts",
    "temperature",
    "device_was_given",
)


@pytest.mark.processes
class WithAdapters(BackendContract):
    plugins = ("fsdp_backend",)
    keeps_open = True

    @contextmanager
    def local(self, model: Path, *, critic: bool = False) -> Iterator[Backend]:
        settings = {"name": "models/local", "device": "cpu", "lora": ADAPTERS}
        with opened(backend_run(model, settings, self.plugins, critic=critic)) as (backend, _):
            yield backend

    def test_facts_count_the_parameters(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, _), self.local(tiny_model) as local:
            assert {**backend.facts(), "device": ""} == {**local.facts(), "device": ""}

    def test_a_temperature_divides_the_logits_before_their_softmax(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = minibatch("padded", layout)
            for one in (backend, local):
                one.update(batch, objective)
            for role in ("policy", "reference"):
                got, wanted = (one.logprobs(batch, role, temperature=0.7) for one in (backend, local))
                torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
            objective = Objective(objective.loss, objective.normalizer, 0.7)
            wanted = local.gradients(batch, objective)
            assert_gradients_close(backend.gradients(batch, objective), wanted, self.gradient_tolerance)


class TestTwoRanksWithAdapters(WithAdapters):
    backend_settings = on(2, lora=ADAPTERS)
    in_every_run = IN_SHORT


@pytest.mark.processes
class TestAdapterOfTwoRanks(AdapterContract):
    plugins = ("fsdp_backend",)
    backend_settings = on(2, lora={"rank": 3, "alpha": 32.0}, probe=False)


@pytest.mark.slow
@pytest.mark.processes
class TestAdapterOfReplicasOnFilesOfHalfPrecision(AdapterContract):
    plugins = ("fsdp_backend",)
    backend_settings = on(4, replicas=2, lora={"rank": 4, "alpha": 32.0, "target_modules": ["q_proj", "lm_head"]})

    @pytest.fixture(scope="class")
    @classmethod
    def adapted_model(cls, half_precision_files: Path) -> Path:
        return half_precision_files


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptBackends]:
    kept = KeptBackends()
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def half_precision_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_bf16(write_tiny_model(tmp_path_factory.mktemp("bf16")))


@contextmanager
def on_half_precision_files(kept: KeptBackends, model: Path) -> Iterator[tuple[Backend, Backend, ParallelLayout]]:
    """Ranks and one process that compute in fp32 with weights in bf16; adapters are outside of the layers too."""
    lora = {**ADAPTERS, "target_modules": ["q_proj", "lm_head"]}
    local_run = backend_run(model, {"name": "models/local", "device": "cpu", "lora": lora}, critic=True)
    run = backend_run(model, on(2, lora=lora), ("fsdp_backend",), critic=True)
    with kept.lend(run) as (backend, layout), opened(local_run) as (local, _):
        yield backend, local, layout


@pytest.mark.processes
def test_adapters_on_files_of_bf16_compute_in_fp32_over_long_rows(
    kept: KeptBackends, half_precision_files: Path
) -> None:
    with on_half_precision_files(kept, half_precision_files) as (backend, local, layout):
        backend.update(*values_batch(layout), role="critic")
        local.update(*values_batch(layout), role="critic")
        batch, objective = minibatch("padded", layout, lengths=LONG)
        for role in ROLES:
            torch.testing.assert_close(backend.logprobs(batch, role), local.logprobs(batch, role), atol=2e-5, rtol=1e-5)
        assert_gradients_close(backend.gradients(batch, objective), local.gradients(batch, objective), 1e-4)


@pytest.mark.processes
def test_adapters_outside_of_the_layers_are_trained_after_the_reference_was_asked(
    kept: KeptBackends, half_precision_files: Path, tmp_path: Path
) -> None:
    with on_half_precision_files(kept, half_precision_files) as (backend, local, layout):
        _assert_trains_alike_after_the_reference(backend, local, layout)
        for step in range(2):
            got, wanted = (one.update(*values_batch(layout, step), role="critic") for one in (backend, local))
            assert_critics_close(without_times(got), without_times(wanted))
        backend.save(tmp_path)
        saved = {
            name: value
            for file in (tmp_path / "critic").glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        assert any("lora" in name for name in saved)
        assert {value.dtype for value in saved.values()} == {torch.float32}


def _assert_trains_alike_after_the_reference(backend: Backend, local: Backend, layout: ParallelLayout) -> None:
    for step in range(3):
        batch, objective = minibatch("padded", layout, step)
        got, wanted = (one.logprobs(batch, "reference") for one in (backend, local))
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
        found, expected = (one.update(batch, objective) for one in (backend, local))
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), (step, name)


@pytest.mark.slow
class TestAdaptersOnExpertsOfReplicas(WithAdapters):
    backend_settings = on(4, replicas=2, lora=ADAPTERS)
    in_every_run = ()

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_moe_model(tmp_path_factory.mktemp("experts"))
