"""The Megatron backend computes what the local backend computes, in every layout and family that it has.

Two ranks that divide each layer pass the whole contract in every run of the tests, and so do, in what stages have of
their own, two that divide the layers among them. All other layouts pass it in long runs (SPURLINE_SOAK=1), where a
tested layer of the way is theirs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron_layouts import on, write_llama3, write_qwen3, write_qwen3_moe, write_qwen25

from spurline.testing import PluginContract
from spurline_rl.testing import BackendContract


class TestPlugin(PluginContract):
    plugin_module = "spurline_megatron_backend.plugin"


@pytest.mark.processes
class MegatronContract(BackendContract):
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
        "temperature",
        "evaluation_sums",
        "critic_learns",
    )


@dataclass(frozen=True)
class Case:
    """A layout, the writer of its model, and what the names of the tests contain that every run makes."""

    settings: dict[str, Any]
    write: Callable[[Path], Path] = write_qwen3
    in_every_run: tuple[str, ...] = ()


GRADIENTS = ("gradients_equal",)
tied, four_layers = partial(write_qwen3, tie_word_embeddings=True), partial(write_qwen3, num_hidden_layers=4)

CASES = {
    "TensorThatRecomputes": Case(on(2, tensor=2, recompute="full")),
    "OneRank": Case(on(1, logits_chunk_tokens=16)),
    "Data": Case(on(2, max_tokens_per_microbatch=40)),
    "Context": Case(on(2, context=2, logits_chunk_tokens=16), in_every_run=GRADIENTS),
    "TensorAndPipeline": Case(on(4, tensor=2, pipeline=2, max_tokens_per_microbatch=40)),
    "TensorAndData": Case(on(4, tensor=2)),
    "TensorAndContext": Case(on(4, tensor=2, context=2)),
    "PipelineAndDataThatRecompute": Case(on(4, pipeline=2, recompute="selective", max_tokens_per_microbatch=40)),
    "InterleavedPipeline": Case(on(2, pipeline=2, virtual_stages=2, max_tokens_per_microbatch=40), four_layers),
    "InterleavedPipelineAndTensor": Case(
        on(4, tensor=2, pipeline=2, virtual_stages=2, max_tokens_per_microbatch=40), four_layers
    ),
    "StagesOfUnequalSize": Case(on(2, pipeline=2), partial(write_qwen3, num_hidden_layers=3)),
    "TiedWeightsOfOneStage": Case(on(2, tensor=2), tied),
    "TiedWeightsOfTwoStages": Case(on(2, pipeline=2), tied, (*GRADIENTS, "loss_and_gradient_norm")),
    "TiedWeightsOfTwoDividedStages": Case(on(4, tensor=2, pipeline=2), tied),
    "Biases": Case(on(2, tensor=2), write_qwen25, (*GRADIENTS, "hugging_face_names")),
    "ScaledRotaryEmbeddings": Case(on(2, tensor=2), write_llama3, GRADIENTS),
    "Experts": Case(on(2, expert=2), write_qwen3_moe, (*GRADIENTS, "loss_and_gradient_norm", "hugging_face_names")),
    "ExpertsThatTensorRanksHoldAlike": Case(on(2, tensor=2), write_qwen3_moe, GRADIENTS),
    "ExpertsAndTensor": Case(on(2, tensor=2, expert=2), write_qwen3_moe),
    "DividedExperts": Case(on(2, tensor=2, expert_tensor=2), write_qwen3_moe),
    "ExpertsOfRanksThatTrainOnDifferentRows": Case(on(4, expert=2, max_tokens_per_microbatch=40), write_qwen3_moe),
    "ExpertsAndContext": Case(on(4, context=2, expert=2), write_qwen3_moe),
    "ExpertsOfTwoStages": Case(on(4, pipeline=2, expert=2, tensor=2), write_qwen3_moe),
    "ExpertsWhoseWeightsDoNotSumToOne": Case(on(2, expert=2), partial(write_qwen3_moe, norm_topk_prob=False)),
}


def contract_of(name: str, case: Case) -> type[MegatronContract]:
    def tiny_model(cls: type, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return case.write(tmp_path_factory.mktemp("model"))

    members = {
        "backend_settings": case.settings,
        "in_every_run": case.in_every_run,
        "tiny_model": pytest.fixture(scope="class")(classmethod(tiny_model)),
        "__module__": __name__,
    }
    return pytest.mark.slow(type(f"Test{name}", (MegatronContract,), members))


for _name, _case in CASES.items():
    globals()[f"Test{_name}"] = contract_of(_name, _case)
