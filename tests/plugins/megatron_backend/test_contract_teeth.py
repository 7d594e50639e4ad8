"""The contract catches the mistakes that parallel training is known for: losses stay right, gradients and norms do not.

Each mistake is made in ranks of its own (`megatron_mistakes`), and tests of the contract find it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron_layouts import on, write_qwen3

from spurline_megatron_backend.backend import MegatronBackend
from spurline_rl.testing import BackendContract
from spurline_rl.testing.backend_runs import KeptBackend

pytestmark = pytest.mark.processes

Break = Callable[..., BackendContract]

TENSOR = {"ranks": 2, "tensor": 2}
PIPELINE = {"ranks": 2, "pipeline": 2}
DATA = {"ranks": 2, "max_tokens_per_microbatch": 40}

GRADIENTS = "test_gradients_equal_the_local_backend_per_parameter"
STEPS = "test_loss_and_gradient_norm_follow_the_local_backend_over_several_steps"
TEMPERATURES = "test_a_temperature_divides_the_logits_before_their_softmax"

soak = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether the output layer is the embedding."""
    return {tied: write_qwen3(tmp_path_factory.mktemp("model"), tie_word_embeddings=tied) for tied in (False, True)}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Break]:
    """The contract for ranks that make a mistake. Called with the name of their worker and the layout."""
    kept = KeptBackend()

    def make(worker: str, layout: dict[str, Any]) -> BackendContract:
        monkeypatch.setattr(MegatronBackend, "worker", f"megatron_mistakes:{worker}")

        class Suite(BackendContract):
            plugins = ("megatron_backend",)
            backend_settings = on(**layout)
            dropout = 0.0
            _kept = kept

        return Suite()

    yield make
    kept.close()


@pytest.mark.parametrize(
    ("mistake", "layout", "tied", "caught_by"),
    [
        pytest.param(
            "gradients_below_the_output_layer_are_summed_over_tensor_ranks",
            TENSOR,
            False,
            {GRADIENTS: "gradient of", STEPS: "grad_norm", TEMPERATURES: "gradient of"},
            marks=soak,
        ),
        pytest.param(
            "losses_are_divided_by_the_micro_batches",
            DATA,
            False,
            {GRADIENTS: "gradient of", STEPS: "grad_norm"},
            marks=soak,
        ),
        pytest.param(
            "norms_are_not_summed_over_tensor_ranks",
            TENSOR,
            False,
            {GRADIENTS: r"gradient of .*norm", STEPS: "grad_norm"},
            marks=soak,
        ),
        pytest.param(
            "parameters_of_several_ranks_count_more_than_once", TENSOR, False, {STEPS: "grad_norm"}, marks=soak
        ),
        pytest.param(
            "parameters_of_several_ranks_count_more_than_once", PIPELINE, True, {STEPS: "grad_norm"}, marks=soak
        ),
        pytest.param(
            "tied_weights_of_two_stages_keep_gradients_of_their_own",
            PIPELINE,
            True,
            {GRADIENTS: r"gradient of model\.embed_tokens\.weight", STEPS: "grad_norm"},
            marks=soak,
        ),
        (
            "the_first_stage_loses_its_gradients",
            PIPELINE,
            False,
            {GRADIENTS: r"gradient of model\.(embed_tokens|layers\.0)\.", STEPS: "grad_norm"},
        ),
    ],
)
def test_the_contract_catches(
    broken: Break,
    models: dict[bool, Path],
    mistake: str,
    layout: dict[str, Any],
    tied: bool,
    caught_by: dict[str, str],
) -> None:
    suite = broken(mistake, layout)
    for name, message in caught_by.items():
        with pytest.raises(AssertionError, match=message):
            getattr(suite, name)(models[tied])


@pytest.mark.parametrize(
    ("layout", "tied"), [pytest.param(TENSOR, False, marks=soak), pytest.param(PIPELINE, True, marks=soak)]
)
def test_ranks_without_a_mistake_pass(
    broken: Break, models: dict[bool, Path], layout: dict[str, Any], tied: bool
) -> None:
    suite = broken("nothing_is_wrong", layout)
    for name in (GRADIENTS, STEPS, TEMPERATURES):
        getattr(suite, name)(models[tied])
