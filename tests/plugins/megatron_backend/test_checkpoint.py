"""What some ranks saved, any others continue, divided in any way; and nothing is taken over that is not whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import Saved, assert_continues
from checkpoint_contract import CheckpointContract
from megatron_layouts import on, write_qwen3, write_qwen3_moe, write_qwen25
from transformers import AutoModelForCausalLM

from spurline.errors import CheckpointError
from spurline.protocols.backend import Backend
from spurline_models.weights import weights_digest

pytestmark = pytest.mark.processes


class TestCheckpoints(CheckpointContract):
    backend = "megatron"
    plugins = ("megatron_backend", "fsdp_backend")
    on = staticmethod(on)
    write = staticmethod(write_qwen3)
    losing_worker = "megatron_ranks:losing"
    test_another_model_is_refused_with_the_weights_that_differ = pytest.mark.slow(
        CheckpointContract.test_another_model_is_refused_with_the_weights_that_differ
    )
    test_files_that_vanish_while_values_are_read_end_the_ranks = pytest.mark.slow(
        CheckpointContract.test_files_that_vanish_while_values_are_read_end_the_ranks
    )
    test_other_optimizers_train_as_on_one_process_and_continue = pytest.mark.slow(
        CheckpointContract.test_other_optimizers_train_as_on_one_process_and_continue
    )

    @pytest.mark.parametrize(
        "settings",
        [
            on(1),
            on(2, tensor=2),
            on(2, pipeline=2),
            pytest.param(on(4, tensor=2, pipeline=2), marks=pytest.mark.slow),
            pytest.param(on(2, context=2), marks=pytest.mark.slow),
        ],
        ids=["one", "tensor", "pipeline", "tensor-pipeline", "context"],
    )
    def test_other_layouts_continue_with_equal_weights(self, saved: Saved, settings: dict[str, Any]) -> None:
        with self.backend_of(saved.model, settings, critic=True) as backend:
            assert_continues(backend, saved, tolerance=1e-7)

    @pytest.mark.slow
    @pytest.mark.parametrize("origin", ["tensor-data", "pipeline-tied", "interleaved", "bias"])
    def test_what_four_ranks_saved_others_continue(self, tmp_path: Path, origin: str) -> None:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        tied = {"tie_word_embeddings": True}
        settings, write, overrides, others = {
            "tensor-data": (
                on(4, tensor=2),
                write_qwen3,
                heads,
                [on(2, context=2), on(2, pipeline=2), on(4, tensor=4)],
            ),
            "pipeline-tied": (on(4, pipeline=2, tensor=2), write_qwen3, tied, [on(1), on(2, pipeline=2)]),
            "interleaved": (
                on(4, pipeline=2, virtual_stages=2),
                write_qwen3,
                {"num_hidden_layers": 4},
                [on(1), on(2, pipeline=2), on(2, tensor=2)],
            ),
            "bias": (on(4, tensor=2), write_qwen25, {}, [on(1), on(2, tensor=2), on(3)]),
        }[origin]
        self.assert_others_continue(tmp_path, write(tmp_path / "model", **overrides), settings, others)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("origin", "others"),
        [
            (on(4, expert=2), [on(1), on(2, tensor=2, expert=2)]),
            (on(4, tensor=2, expert=2, expert_tensor=2), [on(2), on(2, pipeline=2)]),
            (on(1), [on(4, expert=4)]),
        ],
        ids=["expert-data", "expert-tensor", "one"],
    )
    def test_divided_experts_continue_divided_in_another_way(
        self, tmp_path: Path, origin: dict[str, Any], others: list[dict[str, Any]]
    ) -> None:
        self.assert_others_continue(tmp_path, write_qwen3_moe(tmp_path / "model"), origin, others)

    def test_the_weights_a_run_started_from_have_the_digest_that_one_process_makes(self, saved: Saved) -> None:
        causal = AutoModelForCausalLM.from_pretrained(saved.model, dtype=torch.float32)
        facts = json.loads((saved.path / "policy/state.json").read_text())
        assert facts["initial_weights"] == weights_digest(causal)

    @pytest.mark.slow
    def test_a_checkpoint_of_fsdp_says_which_backend_wrote_it(
        self, tmp_path: Path, tiny: Path, two_ranks: Backend
    ) -> None:
        with self.backend_of(tiny, {"name": "fsdp", "device": "cpu", "ranks": 1}, critic=True) as fsdp:
            fsdp.save(tmp_path)
        with pytest.raises(CheckpointError, match=r"checkpoint of backend 'megatron': 'fsdp' wrote it"):
            two_ranks.load(tmp_path)
