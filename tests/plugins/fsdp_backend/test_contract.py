"""The FSDP backend computes what the local backend computes, in every layout it has.

Two ranks pass the whole contract in every run of the tests. Layouts that share most of their way with them pass it in
short, or their gradients alone, and all of it with SPURLINE_SOAK=1: `in_every_run` of a class has what its tests' names
contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsdp_layouts import on
from loss_cases import CORRECTIONS, LOSSES, REGISTRY, LossGradients

from spurline.protocols.backend import Backend
from spurline.testing import PluginContract
from spurline_models.testing import write_tiny_model, write_tiny_moe_model
from spurline_rl.testing import BackendContract
from spurline_rl.testing.backend_runs import backend_run, opened

IN_SHORT = ("loss_and_gradient_norm", "gradients_equal", "packed_and_padded", "hugging_face_names", "uneven_work")
ONE = ("gradients_equal",)
NONE = ()


class TestPlugin(PluginContract):
    plugin_module = "spurline_fsdp_backend.plugin"


@pytest.mark.processes
class FsdpContract(BackendContract):
    plugins = ("fsdp_backend",)
    keeps_open = True


class TestTwoRanks(FsdpContract):
    backend_settings = on(2)


class TestTwoRanksWithTiedWeights(FsdpContract):
    backend_settings = on(2)
    in_every_run = IN_SHORT

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


class WithExperts(FsdpContract):
    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_moe_model(tmp_path_factory.mktemp("experts"))


class TestTwoRanksWithExperts(WithExperts):
    backend_settings = on(2)
    in_every_run = IN_SHORT


class TestExpertsDividedByTwoRanks(WithExperts):
    backend_settings = on(2, expert=2)
    in_every_run = IN_SHORT


@pytest.mark.slow
class TestExpertsDividedByTwoOfFourRanks(WithExperts):
    backend_settings = on(4, expert=2)
    in_every_run = NONE


@pytest.mark.slow
class TestTwoReplicasOfTwoRanks(FsdpContract):
    backend_settings = on(4, replicas=2)
    in_every_run = ONE


@pytest.mark.slow
class TestThreeRanksThatRecompute(FsdpContract):
    backend_settings = on(3, activation_checkpointing=True, logits_chunk_tokens=16, max_tokens_per_microbatch=40)
    in_every_run = NONE


class TestGatheredWeightsAreKept(FsdpContract):
    backend_settings = on(2, reshard_after_forward=False)
    in_every_run = ("loss_and_gradient_norm",)


@pytest.mark.slow
class TestWeightsOnTheHost(FsdpContract):
    backend_settings = on(2, cpu_offload=True)
    in_every_run = ONE


@pytest.mark.slow
class TestCompiledLayers(FsdpContract):
    backend_settings = on(2, compile=True, call_timeout_s=900, collective_timeout_s=900)
    in_every_run = NONE


def test_no_loss_and_no_correction_of_core_is_left_out() -> None:
    for kind, listed in (("loss", LOSSES), ("correction", CORRECTIONS)):
        assert {entry.name for entry in REGISTRY.entries() if entry.kind == kind} == set(listed)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def wanted(one_layer: Path) -> Iterator[LossGradients]:
    with opened(backend_run(one_layer, {"name": "models/local", "device": "cpu", "probe": False})) as (backend, _):
        yield LossGradients(backend)


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, one_layer: Path) -> Iterator[Backend]:
    with opened(backend_run(one_layer, on(request.param, probe=False), ("fsdp_backend",))) as (backend, _):
        yield backend


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_the_gradient_of_the_local_backend(name: str, ranks: Backend, wanted: LossGradients) -> None:
    wanted.assert_equal_those_of(ranks, name)
