"""What an optimizer steps on in the place of weights: rounding without bias, buckets, memory of their own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from spurline_models.device_profile import device_profile
from spurline_models.placement.master_parameters import MasterParameters, round_stochastically

PROFILE = device_profile("cpu", "bf16")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_stochastic_rounding_has_the_value_as_its_mean_and_two_neighbours_as_its_results() -> None:
    values = torch.tensor([1.0 + 2.0**-10, -3.3, 1e-30, 65504.7, -(2.0**-140)])
    drawn = torch.stack([round_stochastically(values, torch.bfloat16, generator(seed)) for seed in range(4000)]).float()
    for column, value in zip(drawn.T, values, strict=True):
        found = column.unique()
        assert len(found) <= 2
        assert found.min() <= value <= found.max()
        gap = float((found.max() - found.min()).double())
        # Four standard errors of the mean of two neighbours.
        assert abs(float(column.double().mean()) - float(value)) <= 4 * 0.5 * gap / 4000**0.5


def test_what_bf16_holds_is_not_moved_and_what_is_not_finite_stays_so() -> None:
    values = torch.cat([torch.randn(3000, generator=generator()).bfloat16().float(), torch.tensor([0.0, -0.0])])
    assert torch.equal(round_stochastically(values, torch.bfloat16, generator()).float(), values)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    rounded = round_stochastically(special, torch.bfloat16, generator())
    assert rounded[:2].tolist() == [torch.inf, -torch.inf]
    assert bool(rounded[2].isnan())


def test_a_small_step_is_lost_to_the_nearest_value_and_not_to_a_random_one() -> None:
    weight, other = (Parameter(torch.ones(4000, dtype=torch.bfloat16)) for _ in range(2))
    master = MasterParameters({"weight": weight, "other": other}, PROFILE, seed=3)
    optimizer = torch.optim.SGD(master.parameters.values(), lr=2.0**-12)
    for number in range(1, 17):
        gradients = {"weight": torch.ones_like(weight), "other": torch.ones_like(other)}
        master.step(optimizer.step, gradients, None, number)
    # Sixteen steps of a sixteenth of what bf16 can tell from 1 below it.
    assert float(weight.detach().double().mean()) == pytest.approx(1 - 16 * 2.0**-12, abs=2e-4)
    # The bits of each step and each parameter are others: with the same ones some values would take every step.
    assert float(weight.detach().double().std()) < 2 * 2.0**-8
    assert not torch.equal(weight, other)
    nearest = Parameter(torch.ones(10, dtype=torch.bfloat16))
    nearest.grad = torch.ones_like(nearest)
    torch.optim.SGD([nearest], lr=2.0**-12).step()
    assert bool((nearest == 1).all())


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "stochastic"])
def test_masters_keep_memory_between_steps_only_where_they_last(masters: bool) -> None:
    wide = torch.randn(64, 32, generator=generator())
    weight, norm = Parameter(wide.bfloat16()), Parameter(torch.ones(32))
    parameters = {"weight": weight, "norm": norm}
    made = MasterParameters(parameters, PROFILE, masters={"weight": wide} if masters else None)
    assert made.parameters["norm"] is norm
    assert made.parameters["weight"].shape == weight.shape
    optimizer = torch.optim.AdamW(made.parameters.values(), lr=0.1, fused=True)
    before = weight.detach().clone()
    gradients = {name: torch.ones_like(value) for name, value in parameters.items()}
    made.step(optimizer.step, gradients, None, 1)
    assert not gradients
    assert not torch.equal(before, weight)
    assert all(value.grad is None for value in made.parameters.values())
    assert made.parameters["weight"].untyped_storage().nbytes() == (wide.nbytes if masters else 0)
    assert [value.data_ptr() for value in made.kept()] == ([wide.data_ptr()] if masters else [])
    assert made.values["weight"].dtype == (torch.float32 if masters else torch.bfloat16)
    if masters:
        assert torch.equal(weight.detach(), made.values["weight"].bfloat16())
