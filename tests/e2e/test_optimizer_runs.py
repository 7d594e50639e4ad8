"""Whole runs with optimizers and schedules of all kinds: cut in pieces they equal the uninterrupted run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fake_plugins import FakePlugins
from run_helpers import Config, Trained, assert_same_run, assert_same_weights, read_metrics, train
from torch.nn import Parameter

from spurline.errors import CheckpointWriteError
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.optimizer import OptimizerConfig
from spurline.protocols.schedule import ScheduleConfig
from spurline_models.optimizers.groups import parameter_groups
from spurline_models.optimizers.schedules import WarmedUp

GROUPS = [{"match": "*embed*", "learning_rate_scale": 0.1}, {"match": "*norm*", "weight_decay": 0.2}]
WSD = [0.5, 1, 1, 1, 2 / 3, 1 / 3]


def in_pieces(config: Config, available: Any = None) -> Trained:
    """Train at once, and again from the checkpoint of step 2 in another run directory. Returns the whole run."""
    config = config | {"checkpoint": {"every_steps": 2, "keep_last": 9}}
    whole = train(config, name="whole", available=available)
    checkpoint = str(whole.run_dir / "checkpoints/step-00000002")
    piece = train(config, name="from-2", available=available, resume=checkpoint)
    assert piece.without_times == whole.without_times[2:]
    assert_same_weights(piece, whole)
    return whole


@pytest.mark.parametrize(
    ("optimizer", "schedule", "factors"),
    [
        ({"name": "muon"}, {"name": "linear"}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ({"name": "sgd", "momentum": 0.9, "learning_rate": 0.1}, {"name": "wsd", "decay_ratio": 0.5}, WSD),
    ],
    ids=lambda value: value.get("name") if isinstance(value, dict) else "",
)
def test_a_run_with_another_optimizer_and_schedule_cut_in_pieces_equals_the_whole(
    base_config: Config, optimizer: Config, schedule: Config, factors: list[float]
) -> None:
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.1, "groups": GROUPS, **optimizer}
    lines = in_pieces({**base_config, "optimizer": optimizer, "schedule": schedule | {"warmup_steps": 2}}).lines
    assert lines[-1]["loss"] < lines[0]["loss"]
    rates = [optimizer["learning_rate"] * factor for factor in factors]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-3)
    assert [line["lr/groups.0"] for line in lines] == pytest.approx([0.1 * rate for rate in rates], rel=1e-3)


def test_a_run_extended_before_its_decay_equals_the_longer_run(base_config: Config) -> None:
    config = {**base_config, "schedule": {"name": "wsd", "decay_steps": 2}}
    longer = train(config, name="longer", steps=8)
    # The shorter run of 6 steps begins to decay after its fourth.
    extended = train(config, checkpoint={"every_steps": 4, "keep_last": 9})
    checkpoint = str(extended.run_dir / "checkpoints/step-00000004")
    assert_same_run(train(config, steps=8, resume=checkpoint), longer)


class HalvingConfig(OptimizerConfig):
    """A third party's optimizer, which keeps an int and changes its groups."""

    name: str = "halving"


class Halving(torch.optim.Optimizer):
    def __init__(self, config: HalvingConfig, named_parameters: Mapping[str, Parameter]) -> None:
        super().__init__(parameter_groups(config, named_parameters), {"seen": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] * 2.0 ** -(state["steps"] + group["seen"]))


class KeepingConfig(OptimizerConfig):
    """A third party's optimizer, whose state no checkpoint can hold."""

    name: str = "keeping"


class Keeping(Halving):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [parameter.grad]


class EveryOtherConfig(ScheduleConfig):
    """A third party's schedule."""

    name: str = "every_other"


class EveryOther(WarmedUp):
    def after_warmup(self, done: int, steps: int, total: int) -> float:
        return 1.0 if done % 2 == 0 else 0.25


def register(registry: ComponentRegistrar) -> None:
    registry.add(HalvingConfig, f"{__name__}:Halving")
    registry.add(KeepingConfig, f"{__name__}:Keeping")
    registry.add(EveryOtherConfig, f"{__name__}:EveryOther")


def test_an_optimizer_and_a_schedule_of_a_third_party_run_and_resume_exactly(
    base_config: Config, plugins: FakePlugins
) -> None:
    available = plugins.add("own", register=register)
    optimizer = {"name": "halving", "learning_rate": 0.5, "groups": GROUPS}
    schedule = {"name": "every_other", "warmup_steps": 1}
    config = {**base_config, "plugins": ["own"], "optimizer": optimizer, "schedule": schedule}
    rates = [line["lr"] for line in in_pieces(config, available).lines]
    assert rates == pytest.approx([0.5, 0.5, 0.125, 0.5, 0.125, 0.5])


def test_an_optimizer_whose_state_cannot_be_saved_is_named_at_the_first_checkpoint(
    base_config: Config, plugins: FakePlugins
) -> None:
    available = plugins.add("own", register=register)
    config = {**base_config, "plugins": ["own"], "optimizer": "keeping"}
    with pytest.raises(CheckpointWriteError, match=r"optimizer 'keeping' keeps `history` of \S+ as list"):
        train(config, available=available)
    assert [line["step"] for line in read_metrics(base_config["run_dir"])] == [1, 2]
