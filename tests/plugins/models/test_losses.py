"""Token losses against their formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_models.losses.configs import CrossEntropyConfig, DynamicFineTuningConfig
from spurline_models.losses.cross_entropy import CrossEntropy, DynamicFineTuning


def inputs(logprobs: Tensor) -> TokenLossInputs:
    return TokenLossInputs(logprobs, torch.zeros(len(logprobs), dtype=torch.int64), 1, {})


def some_logprobs() -> Tensor:
    return torch.tensor([-0.1, -1.0, -2.5, -9.0], dtype=torch.float64, requires_grad=True)


def test_cross_entropy_is_the_negative_logprob_and_its_gradient_is_minus_one() -> None:
    logprobs = some_logprobs()
    loss = CrossEntropy(CrossEntropyConfig()).token_loss(inputs(logprobs))
    assert torch.equal(loss, -logprobs)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.equal(gradient, torch.full_like(logprobs, -1.0))


def test_dynamic_fine_tuning_weighs_each_token_by_its_own_probability() -> None:
    logprobs = some_logprobs()
    loss = DynamicFineTuning(DynamicFineTuningConfig()).token_loss(inputs(logprobs))
    torch.testing.assert_close(loss, -logprobs.exp() * logprobs, rtol=1e-14, atol=0)


def test_dynamic_fine_tuning_sends_no_gradient_through_the_probability() -> None:
    logprobs = some_logprobs()
    loss = DynamicFineTuning(DynamicFineTuningConfig()).token_loss(inputs(logprobs))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    # With the factor differentiated it would be -p * (1 + log p).
    torch.testing.assert_close(gradient, -logprobs.detach().exp(), rtol=1e-14, atol=0)
