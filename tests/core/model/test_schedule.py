"""Learning rate by step."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from spurline.config.run_config import ScheduleConfig
from spurline.model.optimizer import learning_rate


def rates(total: int = 20, peak: float = 0.5, **settings: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(settings)
    return [learning_rate(step, peak=peak, total=total, schedule=schedule) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("name", "reference"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_decay_is_that_of_transformers(name: str, reference: object, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = reference(optimizer, warmup, 20)  # type: ignore[operator]
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(name=name, warmup_steps=warmup)[warmup:] == pytest.approx(expected[warmup:])


def test_warm_up_rises_in_equal_steps_to_the_peak_and_wastes_no_step_at_zero() -> None:
    assert rates(name="constant", warmup_steps=4)[:6] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])
    assert rates(name="linear", warmup_ratio=0.2)[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_warm_up_steps_take_precedence_over_the_ratio() -> None:
    assert rates(name="constant", warmup_steps=0, warmup_ratio=0.5) == [0.5] * 20


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_min_ratio_is_where_the_decay_ends(name: str) -> None:
    schedule = ScheduleConfig.model_validate({"name": name, "min_ratio": 0.1})
    for step in (21, 22, 1000):
        assert learning_rate(step, peak=0.5, total=20, schedule=schedule) == pytest.approx(0.05)
    values = rates(name=name, min_ratio=0.1)
    assert values == sorted(values, reverse=True)
    assert 0.05 < values[-1] < 0.08


def test_half_way_a_cosine_is_at_half_the_peak() -> None:
    assert rates(name="cosine")[10] == pytest.approx(0.25)
    assert rates(name="cosine")[5] == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_a_run_that_is_all_warm_up_never_divides_by_zero() -> None:
    assert rates(total=3, name="linear", warmup_ratio=1.0) == pytest.approx([0.5 / 3, 1 / 3, 0.5])
    assert rates(total=2, name="cosine", warmup_steps=10) == pytest.approx([0.05, 0.1])
