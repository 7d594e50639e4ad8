"""Masters, which an optimizer steps on in the place of weights: buckets, and memory of their own."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from spurline_models.device_profile import device_profile
from spurline_models.placement.master_parameters import VALUES_AT_ONCE, MasterParameters, step_buckets


def test_a_step_changes_masters_and_gives_the_model_the_nearest_values() -> None:
    wide = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    weight, norm = Parameter(wide.bfloat16()), Parameter(torch.ones(32))
    parameters = {"weight": weight, "norm": norm}
    made = MasterParameters(parameters, device_profile("cpu", "bf16"), {"weight": wide})
    assert made.parameters["norm"] is norm
    optimizer = torch.optim.AdamW(made.parameters.values(), lr=0.1, fused=True)
    before = weight.detach().clone()
    gradients = {name: torch.ones_like(value) for name, value in parameters.items()}
    made.step(optimizer.step, gradients)
    assert not gradients
    assert not torch.equal(before, weight)
    assert all(value.grad is None for value in made.parameters.values())
    assert [value.data_ptr() for value in made.kept()] == [wide.data_ptr()]
    assert torch.equal(weight.detach(), made.values["weight"].bfloat16())


def test_few_parameters_are_stepped_on_at_once_where_the_optimizer_allows_it() -> None:
    sizes = {"a": VALUES_AT_ONCE // 2, "b": VALUES_AT_ONCE // 2, "c": 1, "large": 2 * VALUES_AT_ONCE}
    assert step_buckets(sizes, apart=True) == [["a", "b"], ["c"], ["large"]]
    assert step_buckets(sizes, apart=False) == [list(sizes)]
