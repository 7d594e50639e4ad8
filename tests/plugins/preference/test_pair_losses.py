"""The losses of preference pairs against plain numpy, in value and, by finite differences, in gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spurline.protocols.loss import Loss, TokenLossInputs
from spurline_models.testing import LossContract
from spurline_preference.configs import CpoConfig, DpoConfig, OrpoConfig, SimpoConfig
from spurline_preference.dpo import Dpo
from spurline_preference.pairs import PairLoss
from spurline_preference.reference_free import Cpo, Orpo, Simpo

Array = NDArray[np.float64]

CASES: dict[str, PairLoss] = {
    "sigmoid": Dpo(DpoConfig()),
    "smoothed": Dpo(DpoConfig(label_smoothing=0.1, beta=0.5)),
    "robust": Dpo(DpoConfig(loss_type="robust", label_smoothing=0.2)),
    "hinge": Dpo(DpoConfig(loss_type="hinge", beta=0.7)),
    "ipo": Dpo(DpoConfig(loss_type="ipo", beta=0.3)),
    "with_likelihood": Dpo(DpoConfig(sft_weight=0.5)),
    "normalized": Dpo(DpoConfig(length_normalized=True, beta=2.0)),
    "simpo": Simpo(SimpoConfig(gamma=0.4, label_smoothing=0.1)),
    "cpo": Cpo(CpoConfig()),
    "orpo": Orpo(OrpoConfig(beta=0.5)),
}


class TestDpo(LossContract):
    def make_loss(self) -> Loss:
        return CASES["sigmoid"]


class TestIpoWithLikelihood(LossContract):
    def make_loss(self) -> Loss:
        return Dpo(DpoConfig(loss_type="ipo", sft_weight=1.0))


class TestSimpo(LossContract):
    def make_loss(self) -> Loss:
        return CASES["simpo"]


class TestCpo(LossContract):
    def make_loss(self) -> Loss:
        return CASES["cpo"]


class TestOrpo(LossContract):
    def make_loss(self) -> Loss:
        return CASES["orpo"]


def log_sigma(margin: float) -> float:
    return -math.log1p(math.exp(-margin))


def oracle(name: str, chosen: Array, rejected: Array, chosen_ref: Array, rejected_ref: Array) -> dict[str, float]:
    """Loss and metrics of one pair, from the logprobs of its answers' tokens under both models."""
    config: Any = CASES[name].config
    sides = ((chosen, chosen_ref), (rejected, rejected_ref))
    if name == "orpo":
        probabilities = [math.exp(np.mean(logprobs)) for logprobs, _ in sides]
        rewards = [math.log(p / (1 - p)) for p in probabilities]
    elif name in ("simpo", "cpo"):
        add: Any = np.mean if name == "simpo" else np.sum
        rewards = [config.beta * float(add(logprobs)) for logprobs, _ in sides]
    else:
        add = np.mean if name in ("ipo", "normalized") else np.sum
        rewards = [config.beta * float(add(logprobs - reference)) for logprobs, reference in sides]
    margin, smoothing = rewards[0] - rewards[1], getattr(config, "label_smoothing", 0.0)
    if name == "hinge":
        loss = max(0.0, 1 - margin)
    elif name == "ipo":
        loss = (margin / config.beta - 1 / (2 * config.beta)) ** 2
    elif name == "orpo":
        loss = -config.beta * log_sigma(margin)
    elif name == "robust":
        loss = (-(1 - smoothing) * log_sigma(margin) + smoothing * log_sigma(-margin)) / (1 - 2 * smoothing)
    else:
        beyond = margin - getattr(config, "gamma", 0.0)
        loss = -(1 - smoothing) * log_sigma(beyond) - smoothing * log_sigma(-beyond)
    return {
        "loss": loss - config.sft_weight * float(np.mean(chosen)),
        "preference/margin": margin,
        "preference/accuracy": float(margin > 0),
        "preference/chosen_reward": rewards[0],
        "preference/rejected_reward": rewards[1],
        "preference/chosen_logprob": float(np.mean(chosen)),
        "preference/rejected_logprob": float(np.mean(rejected)),
    }


class Pairs:
    """Answers of random lengths in a random order of segments, tokens of a segment together."""

    def __init__(self, lengths: list[tuple[int, int]], seed: int) -> None:
        random = np.random.default_rng(seed)
        answers = [(pair, side) for pair in range(len(lengths)) for side in (0, 1)]
        order = [answers[number] for number in random.permutation(len(answers))]
        self.count = len(lengths)
        self.segment = np.repeat(np.arange(len(order)), [lengths[pair][side] for pair, side in order])
        self.pair = np.array([order[segment][0] for segment in self.segment])
        self.side = np.array([order[segment][1] for segment in self.segment])
        self.logprobs = -3 * random.random(len(self.segment))
        self.reference = self.logprobs + 0.5 * random.standard_normal(len(self.segment))

    def inputs(self, logprobs: Array) -> TokenLossInputs:
        ids = (self.pair + 1) * np.where(self.side == 0, 1, -1)
        return TokenLossInputs(
            logprobs=torch.from_numpy(logprobs.copy()).requires_grad_(),
            segment_index=torch.from_numpy(self.segment),
            num_segments=2 * self.count,
            columns={
                "reference_logprobs": torch.from_numpy(self.reference),
                "pair_ids": torch.from_numpy(ids.astype(np.int32)),
            },
        )

    def expected(self, name: str, logprobs: Array) -> list[dict[str, float]]:
        found = []
        for pair in range(self.count):
            chosen, rejected = ((self.pair == pair) & (self.side == side) for side in (0, 1))
            reference = self.reference
            found.append(oracle(name, logprobs[chosen], logprobs[rejected], reference[chosen], reference[rejected]))
        return found


LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4)


@pytest.mark.parametrize("name", sorted(CASES))
@given(lengths=LENGTHS, seed=st.integers(0, 10_000))
@settings(max_examples=30, database=None)
def test_every_token_has_the_loss_and_metrics_that_numpy_finds_for_its_pair(
    name: str, lengths: list[tuple[int, int]], seed: int
) -> None:
    pairs, loss = Pairs(lengths, seed), CASES[name]
    inputs = pairs.inputs(pairs.logprobs)
    with torch.no_grad():
        got = {"loss": loss.token_loss(inputs), **loss.metrics(inputs)}
    expected = pairs.expected(name, pairs.logprobs)
    for metric, values in got.items():
        np.testing.assert_allclose(values, [expected[pair][metric] for pair in pairs.pair], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CASES))
@given(lengths=LENGTHS, seed=st.integers(0, 10_000))
@settings(max_examples=10, database=None)
def test_gradients_are_the_finite_differences_of_the_mean_over_pairs(
    name: str, lengths: list[tuple[int, int]], seed: int
) -> None:
    pairs, loss = Pairs(lengths, seed), CASES[name]
    if name == "hinge" and any(abs(pair["loss"]) < 1e-3 for pair in pairs.expected(name, pairs.logprobs)):
        return  # no derivative at the corner

    def mean(logprobs: Array) -> float:
        return float(np.mean([pair["loss"] for pair in pairs.expected(name, logprobs)]))

    inputs = pairs.inputs(pairs.logprobs)
    weights = 1 / np.bincount(pairs.pair)[pairs.pair]
    total = (torch.from_numpy(weights) * loss.token_loss(inputs)).sum() / pairs.count
    (gradient,) = torch.autograd.grad(total, inputs.logprobs)
    for token in range(len(pairs.logprobs)):
        step = np.zeros_like(pairs.logprobs)
        step[token] = 1e-5
        slope = (mean(pairs.logprobs + step) - mean(pairs.logprobs - step)) / 2e-5
        assert float(gradient[token]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_at_the_reference_the_loss_is_log_2_and_no_pair_counts_as_right() -> None:
    pairs, loss = Pairs([(3, 2), (1, 4)], seed=0), CASES["sigmoid"]
    inputs = pairs.inputs(pairs.reference)
    assert loss.token_loss(inputs).tolist() == pytest.approx([math.log(2)] * len(pairs.pair))
    assert loss.metrics(inputs)["preference/accuracy"].tolist() == [0.0] * len(pairs.pair)


def test_segments_without_loss_do_not_disturb_the_pairs() -> None:
    pairs, loss = Pairs([(3, 2), (1, 4)], seed=1), CASES["sigmoid"]
    inputs = pairs.inputs(pairs.logprobs)
    more = TokenLossInputs(inputs.logprobs, 2 * inputs.segment_index + 1, 9, inputs.columns)
    assert torch.equal(loss.token_loss(more), loss.token_loss(inputs))


def test_a_pair_of_which_one_answer_is_missing_has_no_finite_loss() -> None:
    pairs, loss = Pairs([(3, 2), (1, 4)], seed=2), CASES["sigmoid"]
    inputs = pairs.inputs(pairs.logprobs)
    kept = torch.from_numpy((pairs.pair != 0) | (pairs.side == 0))
    columns = {name: column[kept] for name, column in inputs.columns.items()}
    alone = TokenLossInputs(inputs.logprobs[kept], inputs.segment_index[kept], inputs.num_segments, columns)
    assert not bool(torch.isfinite(loss.token_loss(alone)).all())


def test_answers_that_are_certain_have_finite_odds() -> None:
    pairs = Pairs([(3, 2), (1, 4)], seed=3)
    inputs = pairs.inputs(0.0 * pairs.logprobs)
    loss = CASES["orpo"].token_loss(inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.logprobs)
    assert bool(torch.isfinite(loss).all() and torch.isfinite(gradient).all())
