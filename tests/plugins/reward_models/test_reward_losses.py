"""The losses of reward models: which scores they read, and what they are equal to."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spurline.protocols.loss import Loss, TokenLossInputs
from spurline_models.testing import LossContract
from spurline_reward_models.configs import BradleyTerryConfig, StepRewardConfig
from spurline_reward_models.losses import BradleyTerry, StepReward


class TestBradleyTerry(LossContract):
    def make_loss(self) -> Loss:
        return BradleyTerry(BradleyTerryConfig(margin=0.2, centering=0.05))


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


def test_a_step_has_the_cross_entropy_of_its_label_or_the_squared_error() -> None:
    scores, labels = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.25])
    inputs = TokenLossInputs(scores, torch.zeros(2, dtype=torch.int64), 1, {"step_labels": labels}, None)
    chances = scores.sigmoid()
    expected = -labels * chances.log() - (1 - labels) * (1 - chances).log()
    torch.testing.assert_close(StepReward(StepRewardConfig()).token_loss(inputs), expected)
    numbers = StepReward(StepRewardConfig(kind_of_label="number"))
    torch.testing.assert_close(numbers.token_loss(inputs), torch.tensor([1.0, 1.5625]))
