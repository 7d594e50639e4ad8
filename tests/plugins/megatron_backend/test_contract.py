"""The Megatron backend computes what the local backend computes, in every layout and family that it has.

Two ranks that divide each layer pass the whole contract in every run of the tests, and so do, in what stages have of
their own, two that divide the layers among them. All other layouts pass it in long runs (SPURLINE_SOAK=1), where a
tested layer of the way is theirs alone; `in_every_run` of a class has what its tests' names contain.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fast_collators import WithFastCollators
from megatron_layouts import on, write_llama3, write_qwen3, write_qwen3_moe, write_qwen25

from spurline.testing import PluginContract

ONE = ("gradients_equal",)
NONE = ()


class TestPlugin(PluginContract):
    plugin_module = "spurline_megatron_backend.plugin"


@pytest.mark.processes
class MegatronContract(WithFastCollators):
    plugins = ("megatron_backend",)
    dropout = 0.0
    keeps_open = True


class TestTensorAndSequence(MegatronContract):
    backend_settings = on(2, tensor=2)


class TestPipeline(MegatronContract):
    backend_settings = on(2, pipeline=2, max_tokens_per_microbatch=40)
    in_every_run = (
        "loss_and_gradient_norm",
        "gradients_equal",
        "alternate",
        "not_finite",
        "uneven_work",
        "narrow_or_wide",
        "hugging_face_names",
        "logprobs_are",
        "evaluation_sums",
        "critic_learns",
    )


@pytest.mark.slow
class TestTensorWithoutSequence(MegatronContract):
    backend_settings = on(2, tensor=2, sequence_parallel=False, recompute="full")
    in_every_run = NONE


@pytest.mark.slow
class TestOneRank(MegatronContract):
    backend_settings = on(1, logits_chunk_tokens=16)
    in_every_run = NONE


@pytest.mark.slow
class TestData(MegatronContract):
    backend_settings = on(2, max_tokens_per_microbatch=40)
    in_every_run = NONE


@pytest.mark.slow
class TestContext(MegatronContract):
    backend_settings = on(2, context=2, logits_chunk_tokens=16)
    in_every_run = ONE


@pytest.mark.slow
class TestTensorAndPipeline(MegatronContract):
    backend_settings = on(4, tensor=2, pipeline=2, max_tokens_per_microbatch=40)
    in_every_run = NONE


@pytest.mark.slow
class TestTensorAndData(MegatronContract):
    backend_settings = on(4, tensor=2)
    in_every_run = NONE


@pytest.mark.slow
class TestTensorAndContext(MegatronContract):
    backend_settings = on(4, tensor=2, context=2)
    in_every_run = NONE


@pytest.mark.slow
class TestPipelineAndDataThatRecompute(MegatronContract):
    backend_settings = on(4, pipeline=2, recompute="selective", max_tokens_per_microbatch=40)
    in_every_run = NONE


class OfFourLayers(MegatronContract):
    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_qwen3(tmp_path_factory.mktemp("four-layers"), num_hidden_layers=4)


@pytest.mark.slow
class TestInterleavedPipeline(OfFourLayers):
    backend_settings = on(2, pipeline=2, virtual_stages=2, max_tokens_per_microbatch=40)
    in_every_run = NONE


@pytest.mark.slow
class TestInterleavedPipelineAndTensor(OfFourLayers):
    backend_settings = on(4, tensor=2, pipeline=2, virtual_stages=2, max_tokens_per_microbatch=40)
    in_every_run = NONE


@pytest.mark.slow
class TestStagesOfUnequalSize(MegatronContract):
    backend_settings = on(2, pipeline=2)
    in_every_run = NONE

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_qwen3(tmp_path_factory.mktemp("three-layers"), num_hidden_layers=3)


class Tied(MegatronContract):
    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_qwen3(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.mark.slow
class TestTiedWeightsOfOneStage(Tied):
    backend_settings = on(2, tensor=2)
    in_every_run = NONE


@pytest.mark.slow
class TestTiedWeightsOfTwoStages(Tied):
    backend_settings = on(2, pipeline=2)
    in_every_run = ("gradients_equal", "loss_and_gradient_norm")


@pytest.mark.slow
class TestTiedWeightsOfTwoDividedStages(Tied):
    backend_settings = on(4, tensor=2, pipeline=2)
    in_every_run = NONE


@pytest.mark.slow
class TestBiases(MegatronContract):
    backend_settings = on(2, tensor=2)
    in_every_run = ("gradients_equal", "hugging_face_names")

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_qwen25(tmp_path_factory.mktemp("qwen25"))


@pytest.mark.slow
class TestScaledRotaryEmbeddings(MegatronContract):
    backend_settings = on(2, tensor=2)
    in_every_run = ONE

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_llama3(tmp_path_factory.mktemp("llama3"))


class WithExperts(MegatronContract):
    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_qwen3_moe(tmp_path_factory.mktemp("experts"))


@pytest.mark.slow
class TestExperts(WithExperts):
    backend_settings = on(2, expert=2)
    in_every_run = ("gradients_equal", "loss_and_gradient_norm", "hugging_face_names")


@pytest.mark.slow
class TestExpertsThatTensorRanksHoldAlike(WithExperts):
    backend_settings = on(2, tensor=2)
    in_every_run = ONE


@pytest.mark.slow
class TestExpertsAndTensor(WithExperts):
    backend_settings = on(2, tensor=2, expert=2)
    in_every_run = NONE


@pytest.mark.slow
class TestDividedExperts(WithExperts):
    backend_settings = on(2, tensor=2, expert_tensor=2)
    in_every_run = NONE


@pytest.mark.slow
class TestExpertsOfRanksThatTrainOnDifferentRows(WithExperts):
    backend_settings = on(4, expert=2, max_tokens_per_microbatch=40)
    in_every_run = NONE


@pytest.mark.slow
class TestExpertsAndContext(WithExperts):
    backend_settings = on(4, context=2, expert=2)
    in_every_run = NONE


@pytest.mark.slow
class TestExpertsOfTwoStages(WithExperts):
    backend_settings = on(4, pipeline=2, expert=2, tensor=2)
    in_every_run = NONE


@pytest.mark.slow
class TestExpertsWhoseWeightsDoNotSumToOne(WithExperts):
    backend_settings = on(2, expert=2)
    in_every_run = NONE

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_qwen3_moe(tmp_path_factory.mktemp("plain-experts"), norm_topk_prob=False)
