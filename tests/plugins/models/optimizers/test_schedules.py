"""Learning rate by optimizer step against other implementations, and the sections `reduction` and `critic`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from spurline.config.loading import load_config
from spurline.errors import ConfigError
from spurline.protocols.schedule import Schedule

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}


def made(settings: dict[str, Any] | str) -> Schedule:
    loaded = load_config({**BASE, "schedule": settings})
    return loaded.host.registry.create("schedule", loaded.config.schedule)


def factors(total: int = 20, **settings: object) -> list[float]:
    schedule = made(settings)
    return [schedule.factor(step, total) for step in range(1, total + 1)]


def reference(make: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[float]:
    """The first twenty rates of a schedule of transformers whose peak is 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, *arguments, **keywords)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("name", "make"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_decay_is_that_of_transformers(name: str, make: Callable[..., Any], warmup: int) -> None:
    assert factors(name=name, warmup_steps=warmup)[warmup:] == pytest.approx(reference(make, warmup, 20)[warmup:])


@pytest.mark.parametrize(("warmup", "decay", "min_ratio"), [(0, 4, 0.0), (5, 6, 0.25), (3, 17, 0.1)])
def test_warmup_stable_decay_is_that_of_transformers(warmup: int, decay: int, min_ratio: float) -> None:
    expected = reference(
        get_wsd_schedule,
        warmup,
        decay,
        num_stable_steps=20 - warmup - decay,
        decay_type="linear",
        min_lr_ratio=min_ratio,
    )
    got = factors(name="wsd", warmup_steps=warmup, decay_steps=decay, min_ratio=min_ratio)
    assert got[warmup:] == pytest.approx(expected[warmup:])


def test_warmup_stable_decay_of_a_longer_run_goes_on_at_the_peak() -> None:
    schedule = made({"name": "wsd", "decay_steps": 4, "min_ratio": 0.2})
    # Before the decay of the shorter run nothing has been different; after that the rate returns to the peak.
    assert [schedule.factor(step, 10) for step in range(1, 7)] == [schedule.factor(step, 30) for step in range(1, 7)]
    assert schedule.factor(9, 10) == pytest.approx(0.6)
    assert schedule.factor(9, 30) == 1.0
    assert schedule.factor(31, 30) == pytest.approx(0.2)


def notes(total: int, **settings: object) -> list[str]:
    return load_config({**BASE, "schedule": settings}).config.schedule.notes(total)


def test_warm_up_that_outlasts_the_run_is_said() -> None:
    [note] = notes(6, name="cosine", warmup_steps=100)
    assert note.startswith("schedule: warm-up takes 100 optimizer steps and the run has 6, so the learning rate never")
    [note] = notes(6, name="wsd", warmup_steps=6, decay_steps=6)
    assert "reaches its peak only in the last step" in note
    assert notes(6, name="cosine", warmup_steps=5) == []


def rollouts(**settings: Any) -> dict[str, Any]:
    environment = {"name": "single_turn", "rewards": "exact_match"}
    source = {"name": "rollouts", "environment": environment, "prompts_per_step": 6, "advantage": "gae", **settings}
    return {**BASE, "source": source}


def test_a_critic_chooses_its_optimizer_as_the_policy_does() -> None:
    def chosen(written: Any) -> dict[str, Any]:
        return load_config({**rollouts(), "critic": {"optimizer": written}}).resolved()["critic"]["optimizer"]

    assert chosen("muon")["name"] == "muon"
    assert chosen({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9})["momentum"] == 0.9
    assert chosen({"learning_rate": 3e-5})["name"] == "adamw"
    with pytest.raises(ConfigError, match=r"critic\.optimizer is 'muno', but no optimizer .*muon"):
        chosen("muno")


def test_a_critic_is_required_by_gae_and_refused_where_nothing_reads_it() -> None:
    with pytest.raises(ConfigError, match=r"source\.advantage\.name is gae, .*Add a section `critic: \{\}`"):
        load_config(rollouts())
    with pytest.raises(ConfigError, match=r"critic has no effect: the advantage 'grpo'"):
        load_config({**rollouts(advantage="grpo"), "critic": {}})
    with pytest.raises(ConfigError, match=r"critic has no effect: the source 'sft'"):
        load_config({**BASE, "critic": {}})
