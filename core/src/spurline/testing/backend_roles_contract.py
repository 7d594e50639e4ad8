"""What reinforcement learning asks of every backend: temperatures, and models in other roles than the policy's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from spurline.builtin.rl_configs import PpoConfig, ValueLossConfig
from spurline.data.batch import TrainingBatch
from spurline.errors import ModelError
from spurline.losses.ppo import Ppo
from spurline.losses.value import ValueLoss
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.testing.backend_suite import (
    BackendSuite,
    assert_gradients_close,
    assert_weights_equal,
    minibatch,
    weights_of,
    without_times,
)

TEMPERATURE = 0.7


class BackendRolesContract(BackendSuite):
    """Part of `BackendContract`, which is what to subclass."""

    def test_a_temperature_divides_the_logits_before_their_softmax(self, tiny_model: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        with self.backend(tiny_model) as (backend, layout):
            batch, objective = minibatch("padded", layout)
            objective = Objective(objective.loss, objective.normalizer, TEMPERATURE)
            policy = backend.logprobs(batch, temperature=TEMPERATURE)
            reference = backend.logprobs(batch, "reference", temperature=TEMPERATURE)
            gradients = list(backend.gradients(batch, objective))
            updated = backend.update(batch, objective)
        real = batch.without_padding_rows()
        total = torch.zeros(())
        for row in range(real.num_rows):
            count = int(real.segments["length"][row][0])
            tokens = real.tokens["input_ids"][row : row + 1, :count]
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1] / TEMPERATURE
            # log softmax by its definition.
            expected = (logits - logits.exp().sum(-1, keepdim=True).log()).gather(-1, tokens[0, 1:, None])[:, 0]
            weights = real.tokens["loss_weights"][row, 1:count]
            for got in (policy, reference):
                torch.testing.assert_close(
                    got[row, 1:count][weights != 0], expected[weights != 0].detach(), atol=2e-5, rtol=1e-5
                )
            total = total - (weights * expected).sum()
        (total / objective.normalizer).backward()
        assert updated["loss"] == pytest.approx(total.item() / objective.normalizer, rel=1e-4)
        wanted = [(name, value.grad) for name, value in model.named_parameters() if value.grad is not None]
        assert_gradients_close(gradients, wanted, max(self.gradient_tolerance, 1e-5))

    def test_entropy_is_that_of_the_sampled_distribution(self, tiny_model: Path) -> None:
        loss = Ppo(PpoConfig(entropy_coefficient=0.1))
        with self.backend(tiny_model) as (backend, layout), self.local(tiny_model) as local:
            batch = _with_noisy_columns(minibatch("packed", layout)[0])
            objective = Objective(loss, 40.0, TEMPERATURE)
            assert_gradients_close(
                backend.gradients(batch, objective), local.gradients(batch, objective), self.gradient_tolerance
            )
            tempered, plain = backend.update(batch, objective), local.update(batch, Objective(loss, 40.0))
            assert tempered["policy/entropy"] < plain["policy/entropy"]

    def test_the_reference_is_the_model_before_training(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            batch, objective = minibatch("packed", layout)
            before = backend.logprobs(batch)
            for step in range(2):
                backend.update(*minibatch("packed", layout, step))
            trained = backend.logprobs(batch)
            torch.testing.assert_close(backend.logprobs(batch, "reference"), before, atol=1e-6, rtol=0)
            assert torch.equal(backend.logprobs(batch), trained), "asking the reference changed the policy"
            assert not torch.equal(trained, before)
            with pytest.raises(ModelError):
                backend.update(batch, objective, role="reference")

    def test_a_run_without_a_critic_has_none(self, tiny_model: Path) -> None:
        with self.backend(tiny_model) as (backend, layout):
            batch, objective = minibatch("packed", layout)
            before = weights_of(backend)
            with pytest.raises(ModelError, match="critic"):
                backend.logprobs(batch, "critic")
            with pytest.raises(ModelError, match="critic"):
                backend.update(batch, objective, role="critic")
            assert_weights_equal(weights_of(backend), before)

    def test_a_critic_learns_as_that_of_the_local_backend_and_leaves_the_policy_alone(self, tiny_model: Path) -> None:
        if not self.has_critic:
            pytest.skip("trains no critic")
        with self.backend(tiny_model, critic=True) as (backend, layout), self.local(tiny_model, critic=True) as local:
            policy = weights_of(backend)
            assert bool((backend.logprobs(_values_batch(layout)[0], "critic") == 0).all()), "values start at 0"
            for step in range(4):
                batch, objective = _values_batch(layout, step)
                # The head starts at 0, so in the first step the decoder's gradients are 0 in both.
                wanted = dict(local.gradients(batch, objective, role="critic"))
                got = dict(backend.gradients(batch, objective, role="critic"))
                assert_gradients_close(got, wanted, max(self.gradient_tolerance, 1e-4 if step else 0))
                _assert_close_metrics(
                    backend.update(batch, objective, role="critic"), local.update(batch, objective, role="critic")
                )
            batch, _ = _values_batch(layout)
            values = backend.logprobs(batch, "critic")
            torch.testing.assert_close(values, local.logprobs(batch, "critic"), atol=1e-4, rtol=1e-3)
            assert bool((values[batch.without_padding_rows().tokens["loss_weights"] != 0] != 0).any())
            assert_weights_equal(weights_of(backend), policy)

    def test_saving_and_loading_continues_policy_and_critic_bit_for_bit(self, tiny_model: Path, tmp_path: Path) -> None:
        if not self.has_critic:
            pytest.skip("trains no critic")

        def train(backend: Backend, layout: ParallelLayout, step: int) -> list[dict[str, float]]:
            return [
                without_times(backend.update(*_values_batch(layout, step), role="critic")),
                without_times(backend.update(*minibatch("packed", layout, step))),
            ]

        with self.backend(tiny_model, critic=True) as (backend, layout):
            train(backend, layout, 0)
            (tmp_path / "saved").mkdir()
            backend.save(tmp_path / "saved")
            expected = [train(backend, layout, step) for step in (1, 2)]
            values = backend.logprobs(_values_batch(layout)[0], "critic")
        with self.backend(tiny_model, critic=True) as (backend, layout):
            backend.load(tmp_path / "saved")
            assert [train(backend, layout, step) for step in (1, 2)] == expected
            assert torch.equal(backend.logprobs(_values_batch(layout)[0], "critic"), values)


def _with_noisy_columns(batch: TrainingBatch) -> TrainingBatch:
    generator = torch.Generator().manual_seed(5)
    shape = (batch.num_rows, batch.length)
    return batch.with_tokens(
        advantages=torch.randn(shape, generator=generator), old_logprobs=-5 * torch.rand(shape, generator=generator)
    )


def _values_batch(layout: ParallelLayout, seed: int = 0) -> tuple[TrainingBatch, Objective]:
    """Random returns, and what a critic does with them."""
    batch, objective = minibatch("packed", layout, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (batch.num_rows, batch.length)
    columns = {"values": torch.zeros(shape), "returns": torch.randn(shape, generator=generator)}
    loss = ValueLoss(ValueLossConfig(clip=None))
    return batch.with_tokens(**columns), Objective(loss, objective.normalizer)


def _assert_close_metrics(got: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    assert got.keys() == wanted.keys()
    assert got["lr"] == wanted["lr"]
    for name in ("loss", "grad_norm", "value/predicted"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
