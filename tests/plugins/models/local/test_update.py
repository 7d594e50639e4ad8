"""One optimizer step of the local backend, against plain PyTorch on each sample alone, and the formulas of losses."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_batches import Sample, excite, lay_out, local_backend, make_samples, write_model_folder
from every_run import SOAK
from torch import Tensor

from spurline.errors import DataError, NonFiniteLossError
from spurline.protocols.loss import Objective, TokenLossInputs
from spurline_models.device_profile import KeepDouble
from spurline_models.local.backend import LocalBackend
from spurline_models.losses.configs import CrossEntropyConfig, DynamicFineTuningConfig
from spurline_models.losses.cross_entropy import CrossEntropy, DynamicFineTuning

CROSS_ENTROPY = CrossEntropy(CrossEntropyConfig())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def weights_of(backend: LocalBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_weights()}


def oracle_model(backend: LocalBackend) -> Any:
    """A copy of the model with its own attention."""
    causal = copy.deepcopy(backend._model.causal)
    causal.set_attn_implementation("eager")
    return causal


def oracle_loss(causal: Any, samples: Sequence[Sample], normalizer: float) -> Tensor:
    total = torch.zeros((), dtype=causal.dtype)
    for sample in samples:
        logits = causal(input_ids=torch.tensor([sample.tokens]), use_cache=False).logits[0]
        losses = F.cross_entropy(logits[:-1], torch.tensor(sample.tokens[1:], dtype=torch.int64), reduction="none")
        total = total + (losses * torch.tensor(sample.weights[1:])).sum()
    return total / normalizer


def test_gradients_are_those_of_cross_entropy_on_full_logits_sample_by_sample(model: Path) -> None:
    backend = excite(local_backend(model, precision="fp64", rows_per_microbatch=2))
    samples = make_samples([5, 9, 12, 3, 7, 1, 2])
    causal = oracle_model(backend)
    with KeepDouble():
        oracle_loss(causal, samples, 7.5).backward()
    expected = {name: parameter.grad for name, parameter in causal.named_parameters()}
    batch = lay_out(samples, [[0, 1], [2], [3, 4, 5], [6]], gap=1)
    for name, gradient in backend.gradients(batch, Objective(CROSS_ENTROPY, 7.5)):
        assert float((gradient - expected[name]).norm() / expected[name].norm()) <= 1e-10, name


def test_several_updates_equal_a_plain_adamw_loop(model: Path) -> None:
    backend = excite(local_backend(model, precision="fp64", max_tokens_per_microbatch=12))
    causal = oracle_model(backend)
    matrices = [parameter for parameter in causal.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in causal.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False, fused=False)
    for step in range(3):
        samples = make_samples([5, 9, 12, 3], seed=step)
        metrics = backend.update(lay_out(samples, [[0, 1], [2, 3]]), Objective(CROSS_ENTROPY, 11.0))
        with KeepDouble():
            loss = oracle_loss(causal, samples, 11.0)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(causal.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-10)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-10)
        assert metrics["grad_norm"] > 1, "clipping must be part of this test"
    expected = dict(causal.named_parameters())
    for name, weight in backend.named_weights():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-9, atol=1e-11)


def test_metrics_count_tokens_and_average_the_losss_own_values(model: Path) -> None:
    backend = excite(local_backend(model, rows_per_microbatch=1))
    samples = make_samples([5, 9, 12])
    batch = lay_out(samples, length=20)
    loss = DynamicFineTuning(DynamicFineTuningConfig())
    cross_entropy = backend.evaluate(batch, Objective(CROSS_ENTROPY, 1.0))
    metrics = backend.update(batch, Objective(loss, 3.0))
    assert metrics["tokens"] == 26
    assert metrics["loss_tokens"] == batch.num_loss_tokens
    assert metrics["dft/cross_entropy"] == pytest.approx(cross_entropy.loss / cross_entropy.weight, rel=1e-5)
    assert 0 < metrics["dft/probability"] < 1
    assert metrics["time/forward_backward"] > 0
    assert metrics["time/optimizer"] > 0


class AdvantageLoss:
    """-advantage * logprob; NaN advantages break it on purpose."""

    needs = frozenset({"advantages", "entropy"})

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        assert inputs.entropy is not None
        assert inputs.entropy.shape == inputs.logprobs.shape
        return -inputs.columns["advantages"] * inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        assert inputs.entropy is not None
        return {"entropy": inputs.entropy}

    def describe(self) -> str:
        return "For tests."


@pytest.mark.parametrize("rows_per_microbatch", [None, 1])
def test_a_non_finite_loss_leaves_everything_unchanged_and_names_the_samples(
    model: Path, rows_per_microbatch: int | None
) -> None:
    backend = excite(local_backend(model, rows_per_microbatch=rows_per_microbatch))
    batch = lay_out(make_samples([5, 9, 12], loss_share=1.1))
    advantages = torch.ones_like(batch.tokens["loss_weights"])
    good = batch.with_tokens(advantages=advantages.clone())
    advantages[1] = math.nan
    before = weights_of(backend)
    with pytest.raises(NonFiniteLossError, match=r"step 1: loss is nan.*unchanged.*sample-1") as failure:
        backend.update(batch.with_tokens(advantages=advantages), Objective(AdvantageLoss(), 5.0))
    if rows_per_microbatch == 1:
        assert "sample-0" not in str(failure.value)
    assert all(torch.equal(before[name], weight) for name, weight in backend.named_weights())
    fresh = excite(local_backend(model, rows_per_microbatch=rows_per_microbatch))
    expected = fresh.update(good, Objective(AdvantageLoss(), 5.0))
    after = backend.update(good, Objective(AdvantageLoss(), 5.0))
    assert after["grad_norm"] == expected["grad_norm"]
    assert after["lr"] == expected["lr"]


def test_a_loss_that_needs_a_missing_column_is_refused_by_name(model: Path) -> None:
    with pytest.raises(DataError, match="needs advantages"):
        local_backend(model).update(lay_out(make_samples([5])), Objective(AdvantageLoss(), 1.0))


def test_bf16_computes_close_to_fp32_on_fp32_weights(model: Path) -> None:
    exact, half = excite(local_backend(model)), excite(local_backend(model, precision="bf16"))
    batch, objective = lay_out(make_samples([9, 12, 20])), Objective(CROSS_ENTROPY, 20.0)
    assert half.update(batch, objective)["loss"] == pytest.approx(exact.update(batch, objective)["loss"], rel=2e-2)
    assert {weight.dtype for _, weight in half.named_weights()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.skipif(SOAK and shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler")
def test_a_compiled_decoder_gives_the_same_gradients_for_any_lengths(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SOAK:
        # What is ours is the model that is traced, with its backward pass. Kernels take g++ most of a minute.
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, compiled = excite(local_backend(model)), excite(local_backend(model, compile=True))
    for lengths in ([5, 9, 12], [4, 4, 3, 2], [40]):
        batch = lay_out(make_samples(lengths, loss_share=1.1))
        expected = dict(plain.gradients(batch, Objective(CROSS_ENTROPY, 9.0)))
        for name, gradient in compiled.gradients(batch, Objective(CROSS_ENTROPY, 9.0)):
            assert float((gradient - expected[name]).norm() / expected[name].norm()) <= 1e-5, name


class WithExtremes(CrossEntropy):
    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        return {"logprob/max": inputs.logprobs, "logprob/min": inputs.logprobs, "logprob": inputs.logprobs}


@pytest.mark.parametrize("rows_per_microbatch", [None, 1, 2])
def test_metrics_named_max_and_min_are_extremes_over_all_micro_batches(
    model: Path, rows_per_microbatch: int | None
) -> None:
    backend = excite(local_backend(model, precision="fp64", rows_per_microbatch=rows_per_microbatch))
    batch = lay_out(make_samples([5, 9, 12, 3, 7]))
    logprobs = backend.logprobs(batch)
    trained = logprobs[batch.tokens["loss_weights"] != 0]
    metrics = backend.update(batch, Objective(WithExtremes(CrossEntropyConfig()), 1.0))
    assert metrics["logprob/max"] == pytest.approx(float(trained.max()), rel=1e-6)
    assert metrics["logprob/min"] == pytest.approx(float(trained.min()), rel=1e-6)
    assert metrics["logprob/min"] < metrics["logprob"] < metrics["logprob/max"]


def test_a_token_that_the_model_does_not_know_is_named(model: Path) -> None:
    backend = local_backend(model)
    known = backend._model.causal.config.vocab_size
    batch = lay_out(make_samples([5, 9]))
    batch.tokens["input_ids"][0, 2] = known
    with pytest.raises(DataError, match=rf"token {known}, and the model knows 0 to {known - 1}\..*model\.tokenizer"):
        backend.update(batch, Objective(CROSS_ENTROPY, 1.0))


def test_padding_may_be_any_token_and_a_batch_may_have_no_rows(model: Path) -> None:
    backend = local_backend(model)
    batch = lay_out(make_samples([5, 9]))
    expected = backend.logprobs(batch)
    batch.tokens["input_ids"][batch.tokens["segment_ids"] == 0] = backend._model.causal.config.vocab_size + 7
    assert torch.equal(backend.logprobs(batch), expected)
    assert backend.logprobs(batch.between(0, 0)).numel() == 0


def test_dynamic_fine_tuning_weighs_each_token_by_its_probability_and_sends_no_gradient_through_it() -> None:
    logprobs = torch.tensor([-0.1, -1.0, -2.5, -9.0], dtype=torch.float64, requires_grad=True)
    inputs = TokenLossInputs(logprobs, torch.zeros(4, dtype=torch.int64), 1, {})
    loss = DynamicFineTuning(DynamicFineTuningConfig()).token_loss(inputs)
    torch.testing.assert_close(loss, -logprobs.exp() * logprobs, rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    # With the factor differentiated it would be -p * (1 + log p).
    torch.testing.assert_close(gradient, -logprobs.detach().exp(), rtol=1e-14, atol=0)
