"""Adapters on sharded frozen weights train as they do in the local backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fsdp_layouts import on

from spurline.errors import ConfigError, ModelError
from spurline.protocols.backend import Backend
from spurline.protocols.loss import Objective
from spurline.testing import BackendContract, write_tiny_model, write_tiny_moe_model
from spurline.testing.backend_cases import assert_gradients_close, minibatch
from spurline.testing.backend_runs import backend_run, opened

ADAPTERS = {"rank": 4, "alpha": 8.0}
IN_SHORT = (
    "loss_and_gradient_norm",
    "gradients_equal",
    "continues_bit_for_bit",
    "the_reference_is",
    "hugging_face_names",
    "generates",
    "facts",
    "temperature",
)


@pytest.mark.processes
class WithAdapters(BackendContract):
    plugins = ("fsdp_backend",)
    keeps_open = True

    @contextmanager
    def local(self, model: Path, *, critic: bool = False) -> Iterator[Backend]:
        settings = {"name": "core/local", "device": "cpu", "lora": ADAPTERS}
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
def test_an_adapter_on_a_tied_output_layer_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, tie_word_embeddings=True)
    settings = on(2, lora={**ADAPTERS, "target_modules": ["lm_head"]})
    with pytest.raises(ModelError, match="share one weight"), opened(backend_run(model, settings, ("fsdp_backend",))):
        pass


def test_adapters_on_divided_experts_are_refused_by_the_config(tmp_path: Path) -> None:
    model = write_tiny_moe_model(tmp_path)
    with pytest.raises(ConfigError, match=r"backend\.lora together with expert is not supported"):
        backend_run(model, on(2, expert=2, lora=ADAPTERS), ("fsdp_backend",))


@pytest.mark.slow
class TestReplicasWithAdapters(WithAdapters):
    backend_settings = on(4, replicas=2, lora=ADAPTERS)
    in_every_run = ()


@pytest.mark.slow
class TestAdaptersOnExperts(WithAdapters):
    backend_settings = on(2, lora=ADAPTERS)
    in_every_run = ()

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_moe_model(tmp_path_factory.mktemp("experts"))
