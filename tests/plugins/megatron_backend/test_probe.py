"""At start-up ranks refuse a model that computes other logprobs packed, shared or in chunks than of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron_layouts import on, write_qwen3, write_qwen3_moe

from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

soak = pytest.mark.slow


class Ranks:
    """Ranks that started, and so have a model that passed."""

    def __init__(self, backend: Any) -> None:
        self._ranks = backend._ranks

    def found(self, mistake: str) -> str | None:
        """What is wrong by this mistake, of which all ranks say the same; afterwards the model is as it was."""
        [found, *others] = self._ranks.call("check", mistake)
        assert others == [found] * len(others)
        assert all(self._ranks.call("is_as_it_was"))
        return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether it has experts."""
    return {
        False: write_qwen3(tmp_path_factory.mktemp("dense"), num_hidden_layers=4),
        True: write_qwen3_moe(tmp_path_factory.mktemp("experts")),
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((False, {"ranks": 2, "context": 2}), id="context"),
        pytest.param((False, {"ranks": 1}), id="one-rank", marks=soak),
        pytest.param((False, {"ranks": 1, "precision": "bf16"}), id="half-precision", marks=soak),
        pytest.param((False, {"ranks": 2, "tensor": 2}), id="tensor", marks=soak),
        pytest.param((False, {"ranks": 2, "pipeline": 2}), id="pipeline", marks=soak),
        pytest.param(
            (False, {"ranks": 4, "pipeline": 2, "virtual_stages": 2, "context": 2}), id="interleaved", marks=soak
        ),
        pytest.param((True, {"ranks": 2, "context": 2, "expert": 2}), id="experts", marks=soak),
    ],
)
def ranks(request: pytest.FixtureRequest, models: dict[bool, Path]) -> Iterator[Ranks]:
    has_experts, layout = request.param
    patch = pytest.MonkeyPatch()
    patch.setattr(MegatronBackendConfig, "worker", "megatron_probing:probing")
    try:
        with opened(backend_run(models[has_experts], on(**layout), ("megatron_backend",))) as (backend, _):
            yield Ranks(backend)
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("attention ignores segments", "Choose backend fsdp"),
        ("layers mix neighbours", "Choose backend fsdp"),
        ("positions are those of the token before", "Choose backend fsdp"),
        ("chunks score other targets", "Choose backend fsdp"),
        ("values are no numbers", "inf standard deviations"),
    ],
)
def test_tokens_that_see_others_and_wrong_chunks_are_refused_and_then_a_right_model_passes(
    ranks: Ranks, mistake: str, words: str
) -> None:
    assert words in (ranks.found(mistake) or "")
    assert ranks.found("none") is None


def test_positions_that_run_through_are_wrong_only_where_ranks_count_their_own(
    ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    layout = request.node.callspec.params["ranks"][1]
    # Rotary embeddings see distances alone, so only a sequence that two ranks share is wrong.
    assert (ranks.found("positions run through") is not None) == (layout.get("context", 1) > 1)
