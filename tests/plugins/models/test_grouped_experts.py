"""Experts that are computed by grouped products have the values and gradients of a loop over the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import family_of, tiny_model
from torch import Tensor, nn

from spurline_models.device_profile import device_profile
from spurline_models.experts.grouped_experts import EXPERTS_NAME

TOKENS, TOP_K, NUM_EXPERTS, IDLE = 200, 2, 4, 2
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"]


def experts_of(model_type: str) -> tuple[nn.Module, Any]:
    model = tiny_model(family_of(model_type))
    found = [module for module in model.modules() if getattr(module, "down_proj", None) is not None]
    return next(module for module in found if getattr(module.down_proj, "ndim", 0) == 3), model


def computed(experts: nn.Module, implementation: str, model: Any, precision: Any, dtype: torch.dtype) -> list[Tensor]:
    """Outputs, and the gradients of hidden states, weights of experts, and parameters, in float64."""
    experts.to(dtype).zero_grad()
    model.set_experts_implementation(implementation)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = draw(TOKENS, 32).requires_grad_()
    weights = draw(TOKENS, TOP_K).abs().requires_grad_()
    # One expert has no token.
    chosen = torch.rand(TOKENS, NUM_EXPERTS, generator=generator).index_fill_(1, torch.tensor(IDLE), -1).topk(TOP_K)[1]
    with device_profile("cpu", precision).computing():
        output = experts(hidden, chosen, weights)
    assert output.dtype == dtype
    (output * draw(TOKENS, 32)).sum().backward()
    found = [output, hidden.grad, weights.grad, *(value.grad for value in experts.parameters())]
    return [torch.as_tensor(value).double().detach().clone() for value in found]


def distances(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_grouped_experts_equal_a_loop(model_type: str) -> None:
    experts, model = experts_of(model_type)
    exact = computed(experts, "eager", model, "fp64", torch.float64)
    assert max(distances(computed(experts, EXPERTS_NAME, model, "fp32", torch.float32), exact)) < 1e-6
    rounded = distances(computed(experts, EXPERTS_NAME, model, "bf16", torch.float32), exact)
    loop = distances(computed(experts, "eager", model, "bf16", torch.float32), exact)
    for distance, allowed in zip(rounded, loop, strict=True):
        # The loop adds biases in fp32, so the gradients of these have no error there.
        assert 1e-4 < distance < max(2 * allowed, 2**-8)
