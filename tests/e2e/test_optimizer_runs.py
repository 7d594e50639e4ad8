"""Whole runs with every optimizer and schedule: cut in pieces they equal the uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import FakePlugins
from run_helpers import Config, assert_same_run, assert_same_weights, deterministic, read_metrics, train
from torch.nn import Parameter

from spurline.errors import CheckpointWriteError
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.optimizer import OptimizerConfig
from spurline.protocols.schedule import ScheduleConfig
from spurline_models.optimizers.groups import parameter_groups
from spurline_models.optimizers.schedules import WarmedUp

GROUPS = [{"match": "*embed*", "learning_rate_scale": 0.1}, {"match": "*norm*", "weight_decay": 0.2}]


def in_pieces(config: Config, tmp_path: Path, available: Any = None) -> None:
    """Train at once, and again from the checkpoints of steps 2 and 4 in run directories of their own."""
    whole = {**config, "run_dir": str(tmp_path / "whole"), "checkpoint": {"every_steps": 2, "keep_last": 9}}
    train(whole, available=available)
    for start in (2, 4):
        piece = tmp_path / f"from-{start}"
        checkpoint = str(tmp_path / f"whole/checkpoints/step-{start:08d}")
        assert train(whole | {"run_dir": str(piece)}, available=available, resume=checkpoint).status == "finished"
        assert deterministic(read_metrics(piece)) == deterministic(read_metrics(tmp_path / "whole"))[start:]
        assert_same_weights(piece, tmp_path / "whole")


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon", "sgd"])
def test_a_run_with_each_optimizer_cut_in_pieces_equals_the_whole(
    base_config: Config, tmp_path: Path, name: str
) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="the extra optim-8bit is not installed")
    settings = {"momentum": 0.9, "learning_rate": 0.1} if name == "sgd" else {}
    optimizer = {"name": name, "learning_rate": 1e-3, "weight_decay": 0.1, "groups": GROUPS, **settings}
    in_pieces({**base_config, "optimizer": optimizer}, tmp_path)
    lines = read_metrics(tmp_path / "whole")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["lr/groups.0"] == pytest.approx(0.1 * lines[0]["lr"])


@pytest.mark.parametrize("name", ["constant", "linear", "wsd"])
def test_a_run_with_each_schedule_cut_in_pieces_equals_the_whole(
    base_config: Config, tmp_path: Path, name: str
) -> None:
    decay = {"decay_ratio": 0.5} if name == "wsd" else {}
    in_pieces({**base_config, "schedule": {"name": name, "warmup_steps": 2, **decay}}, tmp_path)
    expected = {
        "constant": [0.5, 1, 1, 1, 1, 1],
        "linear": [0.5, 1, 1, 0.75, 0.5, 0.25],
        "wsd": [0.5, 1, 1, 1, 2 / 3, 1 / 3],
    }
    rates = [line["lr"] for line in read_metrics(tmp_path / "whole")]
    assert rates == pytest.approx([1e-3 * factor for factor in expected[name]])


def test_a_run_extended_before_its_decay_equals_the_longer_run(base_config: Config, tmp_path: Path) -> None:
    longer = {**base_config, "schedule": {"name": "wsd", "decay_steps": 2}, "run_dir": str(tmp_path / "longer")}
    train({**longer, "steps": 8})
    extended = {**longer, "run_dir": str(tmp_path / "extended")}
    # The shorter run of 6 steps begins to decay after its fourth.
    train({**extended, "checkpoint": {"every_steps": 4, "keep_last": 9}})
    checkpoint = tmp_path / "extended/checkpoints/step-00000004"
    train({**extended, "steps": 8}, resume=str(checkpoint))
    assert_same_run(tmp_path / "extended", tmp_path / "longer")


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


@pytest.fixture
def third_party() -> Iterator[FakePlugins]:
    with FakePlugins() as plugins:
        plugins.add("own", register=register)
        yield plugins


def test_an_optimizer_and_a_schedule_of_a_third_party_run_and_resume_exactly(
    base_config: Config, tmp_path: Path, third_party: FakePlugins
) -> None:
    optimizer = {"name": "halving", "learning_rate": 0.5, "groups": GROUPS}
    schedule = {"name": "every_other", "warmup_steps": 1}
    config = {**base_config, "plugins": ["own"], "optimizer": optimizer, "schedule": schedule}
    in_pieces(config, tmp_path, third_party.available)
    rates = [line["lr"] for line in read_metrics(tmp_path / "whole")]
    assert rates == pytest.approx([0.5, 0.5, 0.125, 0.5, 0.125, 0.5])


def test_an_optimizer_whose_state_cannot_be_saved_is_named_at_the_first_checkpoint(
    base_config: Config, third_party: FakePlugins
) -> None:
    config = {**base_config, "plugins": ["own"], "optimizer": "keeping"}
    with pytest.raises(CheckpointWriteError, match=r"optimizer 'keeping' keeps `history` of \S+ as list"):
        train(config, available=third_party.available)
    assert [line["step"] for line in read_metrics(base_config["run_dir"])] == [1, 2]
