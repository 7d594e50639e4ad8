"""What every backend must satisfy: it computes what core's local backend computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spurline.protocols.loss import Objective
from spurline.testing.backend_roles_contract import BackendRolesContract
from spurline.testing.backend_suite import (
    LENGTHS,
    alternate_units,
    assert_gradients_close,
    assert_weights_equal,
    minibatch,
    weights_of,
    with_dropout,
    without_times,
)


class BackendContract(BackendRolesContract):
    """Subclass with `backend_settings`, the config's `backend:` section, and `plugins` to enable."""

    def test_loss_and_gradient_norm_follow_the_local_backend_over_several_steps(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            for step in range(4):
                got = backend.update(*minibatch("packed", layout, step))
                wanted = local.update(*minibatch("packed", layout, step))
                for name in ("loss", "grad_norm"):
                    assert got[name] == pytest.approx(wanted[name], rel=self.step_tolerance), (step, name)
                assert got["lr"] == wanted["lr"]

    def test_gradients_equal_the_local_backend_per_parameter(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = minibatch("packed", layout)
            assert_gradients_close(
                backend.gradients(batch, objective), local.gradients(batch, objective), self.gradient_tolerance
            )

    def test_a_wrong_gradient_scale_would_be_caught(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = minibatch("packed", layout)
            wrong = Objective(objective.loss, objective.normalizer * 1.001)
            with pytest.raises(AssertionError, match="gradient"):
                assert_gradients_close(
                    backend.gradients(batch, wrong), local.gradients(batch, objective), self.gradient_tolerance
                )

    def test_packed_and_padded_rows_give_the_same_gradients(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            packed = dict(backend.gradients(*minibatch("packed", layout)))
            padded = backend.gradients(*minibatch("padded", layout))
            assert_gradients_close(padded, packed.items(), self.gradient_tolerance)

    @pytest.mark.parametrize("lengths", [(5, 9, 3, 12), LENGTHS], ids=["few", "many"])
    def test_rows_whose_units_alternate_give_the_gradients_of_the_uncut_batch(
        self, tiny_model: Path, lengths: tuple[int, ...]
    ) -> None:
        # The few fit into one micro-batch of 40 tokens, which then holds them in another order; the many need several.
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch, objective = minibatch("padded", layout, lengths=lengths)
            alternating = alternate_units(batch, layout)
            assert_gradients_close(
                backend.gradients(alternating, objective), local.gradients(batch, objective), self.gradient_tolerance
            )

    def test_gradients_leave_the_model_untouched(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            before = weights_of(backend)
            dict(backend.gradients(*minibatch("packed", layout)))
            assert_weights_equal(weights_of(backend), before)

    def test_saving_and_loading_continues_bit_for_bit(self, tiny_model: Path, tmp_path: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            backend.update(*minibatch("packed", layout, 0))
            (tmp_path / "saved").mkdir()
            backend.save(tmp_path / "saved")
            expected = [without_times(backend.update(*minibatch("packed", layout, step))) for step in (1, 2)]
            weights = weights_of(backend)
        with self.backend(tiny_model) as (backend, layout):
            backend.load(tmp_path / "saved")
            got = [without_times(backend.update(*minibatch("packed", layout, step))) for step in (1, 2)]
            assert got == expected
            assert_weights_equal(weights_of(backend), weights)

    def test_weights_have_their_hugging_face_names_and_values(self, tiny_model: Path) -> None:
        from transformers import AutoModelForCausalLM

        expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
        with self.backend(tiny_model) as (backend, _):
            assert_weights_equal(weights_of(backend), expected)

    def test_logprobs_are_the_models_own_at_loss_positions(self, tiny_model: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        with self.backend(tiny_model) as (backend, layout), torch.no_grad():
            batch, _ = minibatch("padded", layout)
            logprobs = backend.logprobs(batch)
            real = batch.without_padding_rows()
            assert logprobs.shape == real.tokens["input_ids"].shape
            for row in range(real.num_rows):
                count = int(real.segments["length"][row][0])
                tokens = real.tokens["input_ids"][row : row + 1, :count]
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
                expected = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
                trained = real.tokens["loss_weights"][row, 1:count] != 0
                torch.testing.assert_close(logprobs[row, 1:count][trained], expected[trained], atol=2e-5, rtol=1e-5)

    def test_facts_count_the_parameters(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, _):
            facts = backend.facts()
            assert facts["parameters"] == facts["trainable_parameters"]
            assert facts["parameters"] == sum(tensor.numel() for tensor in weights_of(backend).values())

    def test_evaluation_changes_nothing(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            before = weights_of(backend)
            batch, objective = minibatch("packed", layout)
            first, second = backend.evaluate(batch, objective), backend.evaluate(batch, objective)
            assert first == second
            assert first.tokens == batch.num_loss_tokens
            assert_weights_equal(weights_of(backend), before)

    def test_an_update_is_bit_identical_after_an_evaluation(self, tiny_model: Path, tmp_path: Path) -> None:
        model = with_dropout(tiny_model, tmp_path / "model", self.dropout)
        metrics: list[list[dict[str, float]]] = []
        for evaluated in (False, True):
            with self.backend(model) as (backend, layout):
                seen = [without_times(backend.update(*minibatch("packed", layout, 0)))]
                if evaluated:
                    backend.evaluate(*minibatch("padded", layout, 7))
                seen += [without_times(backend.update(*minibatch("packed", layout, step))) for step in (1, 2)]
            metrics.append(seen)
        assert metrics[1] == metrics[0], "evaluation drew random numbers, or left something behind"
