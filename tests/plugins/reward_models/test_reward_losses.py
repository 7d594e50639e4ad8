"""The losses of reward models: which scores they read, and what they are equal to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spurline.protocols.loss import Loss, TokenLossInputs
from spurline_models.testing import LossContract
from spurline_reward_models.configs import BradleyTerryConfig, StepRewardConfig
from spurline_reward_models.losses import BradleyTerry, StepReward


class TestBradleyTerry(LossContract):
    def make_loss(self) -> Loss:
        return BradleyTerry(BradleyTerryConfig(margin=0.2, margin_column="distance", centering=0.05))


class TestStepReward(LossContract):
    def make_loss(self) -> Loss:
        return StepReward(StepRewardConfig(kind_of_label="number"))


def test_a_pair_has_the_loss_of_the_scores_of_its_last_tokens() -> None:
    scores = torch.tensor([9.0, 1.5, 7.0, 8.0, -0.5], requires_grad=True)
    index, pair_ids = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 1, -1, -1, -1])
    loss = BradleyTerry(BradleyTerryConfig(margin=0.5, centering=0.01))
    inputs = TokenLossInputs(scores, index, 2, {"pair_ids": pair_ids}, None)
    expected = -F.logsigmoid(torch.tensor(1.5 - -0.5 - 0.5)) + 0.01 * (1.5 - 0.5) ** 2
    found = loss.token_loss(inputs)
    torch.testing.assert_close(found, expected.expand(5))
    (found.sum() / 5).backward()
    assert scores.grad is not None
    assert scores.grad.nonzero().flatten().tolist() == [1, 4]
    metrics = loss.metrics(inputs)
    assert float(metrics["preference/margin"][0]) == 2.0
    # sigma(2) is 0.88, so the pair counts in the bin from 0.8 to 0.9 alone.
    assert {name: float(value[1][0]) for name, value in metrics.items() if "calibration" in name} == {
        f"reward_model/calibration_{low}": float(low == 0.8) for low in (0.5, 0.6, 0.7, 0.8, 0.9)
    }


def test_the_loss_and_gradient_with_a_margin_per_pair_are_those_of_trl() -> None:
    """The numbers are those of `RewardTrainer.compute_loss` of TRL 1.16.0 for three pairs, centering included."""
    scores = torch.tensor([1.5, -0.5, -0.25, 0.5, 0.75, 2.0], dtype=torch.float64, requires_grad=True)
    pair_ids = torch.tensor([1, -1, 2, -2, 3, -3])
    margins = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64).repeat_interleave(2)
    loss = BradleyTerry(BradleyTerryConfig(margin_column="margin", centering=0.05))
    columns = {"pair_ids": pair_ids, "margin": margins}
    found = loss.token_loss(TokenLossInputs(scores, torch.arange(6), 6, columns, None)).mean()
    (gradient,) = torch.autograd.grad(found, scores)
    assert found.item() == pytest.approx(2.0805492086, abs=1e-9)
    wanted = [-0.006400974, 0.0730676407, -0.275650934, 0.2923176007, -0.2340075434, 0.4173408767]
    assert gradient.tolist() == pytest.approx(wanted, abs=1e-9)


def test_a_step_has_the_cross_entropy_of_its_label_or_the_squared_error() -> None:
    scores, labels = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.25])
    inputs = TokenLossInputs(scores, torch.zeros(2, dtype=torch.int64), 1, {"step_labels": labels}, None)
    chances = scores.sigmoid()
    expected = -labels * chances.log() - (1 - labels) * (1 - chances).log()
    torch.testing.assert_close(StepReward(StepRewardConfig()).token_loss(inputs), expected)
    numbers = StepReward(StepRewardConfig(kind_of_label="number"))
    torch.testing.assert_close(numbers.token_loss(inputs), torch.tensor([1.0, 1.5625]))
