"""The FSDP backend computes what the local backend computes, in every layout it has.

Two ranks pass the whole contract in every run of the tests. Layouts that share most of their way with them pass it in
short, or their gradients alone, and all of it with SPURLINE_SOAK=1: `in_every_run` of a class has what its tests' names
contain.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fsdp_layouts import on

from spurline.testing import PluginContract
from spurline_models.testing import write_tiny_model, write_tiny_moe_model
from spurline_rl.testing import BackendContract

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
    backend_settings = on(4, replicas=2, max_tokens_per_microbatch=40)
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
