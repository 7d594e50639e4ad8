"""The FSDP backend computes what the local backend computes, in every layout it has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fsdp_layouts import on

from spurline.testing import BackendContract, PluginContract, write_tiny_model, write_tiny_moe_model

soak = pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="the whole contract of one more layout")


class TestPlugin(PluginContract):
    plugin_module = "spurline_fsdp_backend.plugin"


@pytest.mark.processes
class FsdpContract(BackendContract):
    plugins = ("fsdp_backend",)
    keeps_open = True


class TestTwoRanks(FsdpContract):
    backend_settings = on(2)


class FsdpContractInShort(FsdpContract):
    """Of a layout that shares most of its way with two ranks: gradients, steps, weights and uneven work."""

    @pytest.fixture(autouse=True)
    def _few(self, request: pytest.FixtureRequest) -> None:
        few = ("loss_and_gradient_norm", "gradients_equal", "packed_and_padded", "hugging_face_names", "uneven_work")
        if not os.environ.get("SPURLINE_SOAK") and not any(name in request.node.name for name in few):
            pytest.skip("in short; SPURLINE_SOAK=1 for all of it")


class TestTwoRanksWithTiedWeights(FsdpContractInShort):
    backend_settings = on(2)

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


class WithExperts(FsdpContractInShort):
    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_moe_model(tmp_path_factory.mktemp("experts"))


class TestTwoRanksWithExperts(WithExperts):
    backend_settings = on(2)


class TestExpertsDividedByTwoRanks(WithExperts):
    backend_settings = on(2, expert=2)


@soak
@pytest.mark.slow
class TestExpertsDividedByTwoOfFourRanks(WithExperts):
    backend_settings = on(4, expert=2)


@soak
@pytest.mark.slow
class TestTwoReplicasOfTwoRanks(FsdpContract):
    backend_settings = on(4, replicas=2)


@soak
@pytest.mark.slow
class TestThreeRanksThatRecompute(FsdpContract):
    backend_settings = on(3, activation_checkpointing=True, logits_chunk_tokens=16, max_tokens_per_microbatch=40)


@soak
@pytest.mark.slow
class TestWeightsOnTheHost(FsdpContract):
    backend_settings = on(2, cpu_offload=True, reshard_after_forward=False)


@soak
@pytest.mark.slow
class TestCompiledLayers(FsdpContractInShort):
    backend_settings = on(2, compile=True, call_timeout_s=600)
