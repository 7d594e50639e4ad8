"""KTO: each answer beside the divergence of its whole step, and the rows that measure it."""

from __future__ import annotations

import math

import pytest
import torch

from spurline.data.batch import TrainingBatch
from spurline.errors import DataError
from spurline.protocols.loss import TokenLossInputs
from spurline_models.testing import LossContract
from spurline_preference.configs import KtoConfig
from spurline_preference.kto import Kto


class TestKto(LossContract):
    def make_loss(self) -> Kto:
        return Kto(KtoConfig(beta=0.4, desirable_weight=1.2, undesirable_weight=0.7))

    def batch(self) -> TrainingBatch:
        batch = super().batch()
        labels = batch.tokens["labels"].clone()
        labels[[1, 4]] = 0
        return batch.with_tokens(labels=labels)

    def test_loss_and_metrics_are_those_of_the_formula(self) -> None:
        columns = {
            "reference_logprobs": torch.tensor([-1.0, -2.0, -0.5]),
            "labels": torch.tensor([1, 1, -1]),
            "kl": torch.tensor([0.5, 0.5, 0.5]),
        }
        inputs = TokenLossInputs(torch.tensor([-0.5, -0.5, -1.5]), torch.tensor([0, 0, 1]), 2, columns)
        good, bad = 0.4 * (2.0 - 0.5), 0.4 * (-1.0 - 0.5)
        expected = [1.2 * (1 - 1 / (1 + math.exp(-good)))] * 2 + [0.7 * (1 - 1 / (1 + math.exp(bad)))]
        assert self.make_loss().token_loss(inputs).tolist() == pytest.approx(expected)
        metrics = self.make_loss().metrics(inputs)
        reward, is_good = metrics["preference/chosen_reward"]
        assert reward[is_good > 0].tolist() == pytest.approx([0.8, 0.8])
        logprob, is_bad = metrics["preference/rejected_logprob"]
        assert logprob[is_bad > 0].tolist() == [-1.5]
        margin = metrics["preference/margin"]
        assert isinstance(margin, torch.Tensor)
        assert margin.tolist() == pytest.approx([good, good, -bad])

    def test_only_rows_with_mismatched_answers_are_scored_and_then_lose_their_loss(self) -> None:
        batch, asked = self.batch(), list[torch.Tensor]()

        def logprobs(role: str, rows: torch.Tensor | None = None) -> torch.Tensor:
            assert role == "policy"
            assert rows is not None
            asked.append(rows)
            return torch.where(rows[:, None], batch.tokens["reference_logprobs"] + 0.25, 0.0)

        prepared = self.make_loss().prepare(batch, logprobs)
        assert torch.nonzero(asked[0]).flatten().tolist() == [1, 4]
        has_loss = batch.tokens["loss_weights"] != 0
        tokens = int(has_loss[[1, 4]].sum())
        assert float(prepared["kl"][0, 0]) == pytest.approx(0.25 * tokens / 2)
        trained = has_loss & (batch.tokens["labels"] != 0)
        assert torch.equal(prepared["loss_weights"] != 0, trained)

    def test_the_reference_point_does_not_depend_on_the_order_of_answers(self) -> None:
        batch = self.batch()
        zeros = torch.zeros_like(batch.tokens["reference_logprobs"])
        scored = (batch.tokens["loss_weights"] != 0) & (batch.tokens["labels"] == 0)
        ratio = torch.tensor([2.0**60, *[1.0] * (int(scored.sum()) - 2), -(2.0**60)])
        for values in (ratio, ratio.flip(0), ratio.roll(1)):
            logprobs = zeros.masked_scatter(scored, values)
            prepared = self.make_loss().prepare(
                batch.with_tokens(reference_logprobs=zeros), lambda role, rows=None, found=logprobs: found
            )
            assert float(prepared["kl"][0, 0]) == (len(ratio) - 2) / 2

    def test_a_batch_without_mismatched_answers_is_refused(self) -> None:
        with pytest.raises(DataError, match="answers with label 0"):
            self.make_loss().prepare(super().batch(), lambda role, rows=None: torch.zeros(()))
