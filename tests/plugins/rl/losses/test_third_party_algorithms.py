"""A plugin adds an advantage and a policy loss in about thirty lines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from fake_plugins import FakePlugins
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from spurline.plugins.host import PluginHost
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.loss import Loss, TokenLossInputs
from spurline_models.testing import LossContract
from spurline_rl.advantages.shared import relative_to_group
from spurline_rl.losses.configs import KlConfig, PolicyLossConfig
from spurline_rl.losses.policy_loss import PolicyLoss, ratio_to_old
from spurline_rl.protocols.advantage import Advantage, AdvantageConfig
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.testing.advantage_contract import AdvantageContract


class BestOfConfig(AdvantageConfig):
    name: str = "best_of"


class BestOf:
    needs: frozenset[str] = frozenset()

    def __init__(self, config: BestOfConfig):
        self.config = config

    def advantages(self, scored: ScoredGroups) -> Mapping[str, NDArray[np.float32]]:
        return scored.spread(relative_to_group(scored, "best_of", lambda returns: returns - returns.max()))

    def describe(self) -> str:
        return "Best of: how far each sample stays behind its prompt's best."


class SquaredConfig(PolicyLossConfig):
    name: str = "squared"
    width: float = Field(default=0.5, gt=0)


class Squared(PolicyLoss):
    def __init__(self, config: SquaredConfig):
        super().__init__(config)
        self.config = config

    def surrogate(self, inputs: TokenLossInputs) -> Tensor:
        ratio = ratio_to_old(inputs)
        return -inputs.columns["advantages"] * ratio + (ratio - 1).square() / self.config.width

    def describe_surrogate(self) -> str:
        return "Squared: policy gradient with a squared penalty on the ratio"


def register(registry: ComponentRegistrar) -> None:
    registry.add(BestOfConfig, f"{__name__}:BestOf")
    registry.add(SquaredConfig, f"{__name__}:Squared")


class TestBestOf(AdvantageContract):
    def make_advantage(self) -> Advantage:
        return BestOf(BestOfConfig())


class TestSquared(LossContract):
    def make_loss(self) -> Loss:
        return Squared(SquaredConfig())


@pytest.fixture
def host() -> PluginHost:
    with FakePlugins() as plugins:
        return PluginHost.load(["thirty_lines"], plugins.add("thirty_lines", register=register))


def test_the_plugins_algorithms_are_built_like_cores_own(host: PluginHost) -> None:
    assert {"best_of", "grpo", "gae"} <= set(host.registry.names("advantage"))
    advantage = host.registry.create("advantage", BestOfConfig())
    assert advantage.advantages(ScoredGroups(AdvantageContract().groups()[:1]))["advantages"].max() == 0


def test_kl_penalty_and_entropy_bonus_come_with_the_base_class(host: PluginHost) -> None:
    config = SquaredConfig(kl=KlConfig(coefficient=0.5, estimator="k2"), entropy_coefficient=0.1)
    loss: Loss = host.registry.create("loss", config)
    assert loss.needs == {"advantages", "old_logprobs", "reference_logprobs", "entropy"}
    values = torch.tensor([-1.0])
    columns = {"advantages": values, "old_logprobs": values, "reference_logprobs": values - 2}
    inputs = TokenLossInputs(values, torch.zeros(1, dtype=torch.int64), 1, columns, entropy=torch.tensor([3.0]))
    assert loss.token_loss(inputs).tolist() == pytest.approx([1.0 + 0.5 * 2.0 - 0.1 * 3.0])
    assert loss.describe().startswith("Squared: policy gradient with a squared penalty on the ratio; plus 0.5 times")
