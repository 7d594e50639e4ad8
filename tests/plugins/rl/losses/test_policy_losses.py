"""Policy losses against plain loops: values, gradients by finite differences, metrics, and what they ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.protocols.loss import Loss, TokenLossInputs
from spurline_models.testing import LossContract
from spurline_rl.losses.algorithms import Cispo, Gspo, PolicyGradient, Ppo, Sapo, ValueLoss
from spurline_rl.losses.configs import (
    CispoConfig,
    GspoConfig,
    KlConfig,
    PolicyGradientConfig,
    PpoConfig,
    SapoConfig,
    ValueLossConfig,
)

Array = np.ndarray

KL = KlConfig(coefficient=0.3, estimator="k3")


@dataclass(frozen=True)
class Tokens:
    """Random tokens of three segments, one of them empty. `x` is what is differentiated: logprobs or values."""

    x: Array
    columns: dict[str, Array]
    entropy: Array
    segments: Array

    def inputs(self, loss: Loss) -> TokenLossInputs:
        columns = {name: torch.tensor(self.columns[name]) for name in loss.needs - {"entropy"}}
        return TokenLossInputs(
            logprobs=torch.tensor(self.x, requires_grad=True),
            segment_index=torch.tensor(self.segments),
            num_segments=3,
            columns=columns,
            entropy=torch.tensor(self.entropy, requires_grad=True) if "entropy" in loss.needs else None,
        )


def some_tokens(seed: int, spread: float = 0.3) -> Tokens:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 9))
    x = -3 * random.random(count) - 0.1
    columns = {
        "old_logprobs": x + spread * random.standard_normal(count),
        "reference_logprobs": x + 0.3 * random.standard_normal(count),
        "advantages": random.standard_normal(count) * (random.random(count) < 0.9),
        "values": x + spread * random.standard_normal(count),
        "returns": random.standard_normal(count),
    }
    return Tokens(x, columns, random.random(count), np.sort(random.choice([0, 2], count)))


# The formulas, token by token. x0 is the point at which constants are taken: where a paper stops the gradient,
# the formula reads x0 and not x.


def ratios(x: Array, t: Tokens) -> list[float]:
    return [math.exp(new - old) for new, old in zip(x, t.columns["old_logprobs"], strict=True)]


def plain_ppo(x: Array, x0: Array, t: Tokens, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Array:
    losses = []
    for ratio, advantage in zip(ratios(x, t), t.columns["advantages"], strict=True):
        objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        losses.append(-objective)
    return np.array(losses)


def plain_gspo(x: Array, x0: Array, t: Tokens, low: float = 3e-4, high: float = 4e-4) -> Array:
    losses = np.zeros(len(x))
    for segment in set(t.segments.tolist()):
        members = [position for position in range(len(x)) if t.segments[position] == segment]
        mean = sum(x[position] - t.columns["old_logprobs"][position] for position in members) / len(members)
        ratio = math.exp(mean)
        for position in members:
            advantage = t.columns["advantages"][position]
            losses[position] = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return losses


def plain_cispo(x: Array, x0: Array, t: Tokens, low: float = 0.0, high: float = 5.0) -> Array:
    weights = [min(max(ratio, low), high) for ratio in ratios(x0, t)]
    return np.array([-w * a * logprob for w, a, logprob in zip(weights, t.columns["advantages"], x, strict=True)])


def plain_sapo(x: Array, x0: Array, t: Tokens) -> Array:
    losses = []
    for ratio, advantage in zip(ratios(x, t), t.columns["advantages"], strict=True):
        tau = 1.0 if advantage > 0 else 1.05
        losses.append(-advantage * (4 / tau) / (1 + math.exp(-tau * (ratio - 1))))
    return np.array(losses)


def plain_value(x: Array, x0: Array, t: Tokens, clip: float | None = 0.2) -> Array:
    losses = []
    for value, old, target in zip(x, t.columns["values"], t.columns["returns"], strict=True):
        error = (value - target) ** 2
        if clip is not None:
            error = max(error, (min(max(value, old - clip), old + clip) - target) ** 2)
        losses.append(0.5 * error)
    return np.array(losses)


def plain_kl(x: Array, t: Tokens, estimator: str) -> Array:
    values = []
    for new, reference in zip(x, t.columns["reference_logprobs"], strict=True):
        odds = math.exp(reference - new)
        values.append(
            {"k1": -math.log(odds), "k2": 0.5 * math.log(odds) ** 2, "k3": odds - 1 - math.log(odds)}[estimator]
        )
    return np.array(values)


@dataclass(frozen=True)
class Case:
    """A loss and its formula. spread: standard deviation of the log ratios to try it on."""

    loss: Loss
    plain: Callable[[Array, Array, Tokens], Array]
    spread: float = 0.3


NO_ENTROPY: dict[str, Any] = {"entropy_metric": False}

CASES: dict[str, Case] = {
    "policy_gradient": Case(
        PolicyGradient(PolicyGradientConfig(**NO_ENTROPY)), lambda x, x0, t: -t.columns["advantages"] * x
    ),
    "policy_gradient with ratio": Case(
        PolicyGradient(PolicyGradientConfig(importance_ratio=True)),
        lambda x, x0, t: -t.columns["advantages"] * np.array(ratios(x, t)),
    ),
    "ppo": Case(Ppo(PpoConfig()), plain_ppo),
    "ppo with clip-higher": Case(Ppo(PpoConfig(clip_high=0.28)), lambda x, x0, t: plain_ppo(x, x0, t, high=0.28)),
    "ppo with dual clip": Case(
        Ppo(PpoConfig(dual_clip=3.0)), lambda x, x0, t: plain_ppo(x, x0, t, dual=3.0), spread=1.5
    ),
    "ppo with penalty and bonus": Case(
        Ppo(PpoConfig(kl=KL, entropy_coefficient=0.7)),
        lambda x, x0, t: plain_ppo(x, x0, t) + 0.3 * plain_kl(x, t, "k3") - 0.7 * t.entropy,
    ),
    "gspo": Case(Gspo(GspoConfig()), plain_gspo, spread=1e-3),
    "gspo with wide clip": Case(
        Gspo(GspoConfig(clip_low=0.2, clip_high=0.3)), lambda x, x0, t: plain_gspo(x, x0, t, 0.2, 0.3)
    ),
    "cispo": Case(Cispo(CispoConfig()), plain_cispo, spread=1.5),
    "cispo with lower bound": Case(
        Cispo(CispoConfig(clip_low=0.3, clip_high=0.5)), lambda x, x0, t: plain_cispo(x, x0, t, 0.7, 1.5)
    ),
    "sapo": Case(Sapo(SapoConfig()), plain_sapo),
    "sapo with k2 penalty": Case(
        Sapo(SapoConfig(kl=KlConfig(coefficient=0.1, estimator="k2"))),
        lambda x, x0, t: plain_sapo(x, x0, t) + 0.1 * plain_kl(x, t, "k2"),
    ),
    "sapo with k1 penalty": Case(
        Sapo(SapoConfig(kl=KlConfig(coefficient=0.1, estimator="k1"))),
        lambda x, x0, t: plain_sapo(x, x0, t) + 0.1 * plain_kl(x, t, "k1"),
    ),
    "value": Case(ValueLoss(ValueLossConfig()), plain_value),
    "value without clip": Case(
        ValueLoss(ValueLossConfig(clip=None)), lambda x, x0, t: plain_value(x, x0, t, clip=None)
    ),
}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


class TestContract(LossContract):
    @pytest.fixture(autouse=True)
    def _each(self, case: Case) -> None:
        self._loss = case.loss

    def make_loss(self) -> Loss:
        return self._loss


@pytest.mark.parametrize("name", sorted(CASES))
@given(seed=st.integers(0, 100_000))
@settings(max_examples=30)
def test_loss_is_its_formula(name: str, seed: int) -> None:
    case = CASES[name]
    tokens = some_tokens(seed, case.spread)
    got = case.loss.token_loss(tokens.inputs(case.loss)).detach().numpy()
    np.testing.assert_allclose(got, case.plain(tokens.x, tokens.x, tokens), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CASES))
@given(seed=st.integers(0, 100_000))
@settings(max_examples=30)
def test_gradient_is_the_slope_of_the_formula(name: str, seed: int) -> None:
    case = CASES[name]
    tokens = some_tokens(seed, case.spread)
    weights = np.random.default_rng(seed).random(len(tokens.x)) + 0.1
    loss = case.loss.token_loss(inputs := tokens.inputs(case.loss))
    (gradient,) = torch.autograd.grad((torch.tensor(weights) * loss).sum(), inputs.logprobs)
    for position, slope in enumerate(gradient.tolist()):
        below, centre, above = (
            float(weights @ case.plain(shifted(tokens.x, position, step), tokens.x, tokens))
            for step in (-1e-6, 0, 1e-6)
        )
        # At a kink, such as a clip's bound, the two sides have different slopes and there is nothing to compare.
        if abs(above - 2 * centre + below) < 1e-10:
            assert slope == pytest.approx((above - below) / 2e-6, rel=1e-5, abs=1e-6)


def shifted(x: Array, position: int, step: float) -> Array:
    moved = x.copy()
    moved[position] += step
    return moved


def test_entropy_bonus_pulls_on_the_entropy() -> None:
    loss = CASES["ppo with penalty and bonus"].loss
    inputs = some_tokens(0).inputs(loss)
    assert inputs.entropy is not None
    (gradient,) = torch.autograd.grad(loss.token_loss(inputs).sum(), inputs.entropy)
    assert gradient.tolist() == pytest.approx([-0.7] * len(gradient))


def test_a_loss_asks_only_for_what_its_config_uses() -> None:
    assert CASES["policy_gradient"].loss.needs == {"advantages"}
    assert CASES["ppo"].loss.needs == {"advantages", "old_logprobs", "entropy"}
    assert Ppo(PpoConfig(entropy_metric=False)).needs == {"advantages", "old_logprobs"}
    assert Ppo(PpoConfig(kl=KL, entropy_metric=False)).needs == {"advantages", "old_logprobs", "reference_logprobs"}
    assert Ppo(PpoConfig(entropy_metric=False, entropy_coefficient=0.1)).needs >= {"entropy"}


def two_tokens(loss: Loss, ratio: tuple[float, ...], advantages: tuple[float, ...]) -> dict[str, list[float]]:
    old = torch.full((len(ratio),), -1.0, dtype=torch.float64)
    columns = {
        "old_logprobs": old,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "reference_logprobs": old,
    }
    segments = torch.zeros(len(ratio), dtype=torch.int64)
    logprobs = old + torch.tensor(ratio, dtype=torch.float64).log()
    inputs = TokenLossInputs(logprobs, segments, 1, columns, entropy=0.5 - old)
    with torch.no_grad():
        return {name: values.tolist() for name, values in loss.metrics(inputs).items()}


def test_ppo_reports_the_tokens_whose_gradient_is_clipped_away() -> None:
    loss = Ppo(PpoConfig(dual_clip=3.0, kl=KL))
    found = two_tokens(loss, (0.5, 0.5, 1.5, 1.5, 4.0, 1.0), (-1.0, 1.0, 1.0, -1.0, -1.0, 1.0))
    assert found["policy/clip_fraction_low"] == [1, 0, 0, 0, 0, 0]
    assert found["policy/clip_fraction_high"] == [0, 0, 1, 0, 0, 0]
    assert found["policy/clip_fraction_dual"] == [0, 0, 0, 0, 1, 0]
    assert found["policy/ratio"] == pytest.approx([0.5, 0.5, 1.5, 1.5, 4.0, 1.0])
    assert found["policy/ratio/max"] == found["policy/ratio"] == found["policy/ratio/min"]
    assert found["policy/kl_old"] == pytest.approx([r - 1 - math.log(r) for r in (0.5, 0.5, 1.5, 1.5, 4.0, 1.0)])
    assert found["policy/kl_reference"] == pytest.approx(
        [1 / r - 1 + math.log(r) for r in (0.5, 0.5, 1.5, 1.5, 4.0, 1.0)]
    )
    assert found["policy/entropy"] == [1.5] * 6


def test_gspo_reports_the_ratio_of_the_sequence() -> None:
    found = two_tokens(Gspo(GspoConfig()), (0.5, 2.0, 8.0), (1.0, 1.0, -1.0))
    assert found["policy/sequence_ratio"] == pytest.approx([2.0] * 3)
    assert found["policy/clip_fraction_high"] == [1, 1, 0]


def test_sapo_reports_how_far_its_gate_is_open() -> None:
    gate = two_tokens(Sapo(SapoConfig()), (1.0, 1.5, 9.0), (1.0, 1.0, 1.0))["policy/gate"]
    assert gate[0] == 1.0
    assert gate[0] > gate[1] > gate[2] > 0


def test_cispo_reports_the_weights_it_clipped() -> None:
    found = two_tokens(Cispo(CispoConfig(clip_low=0.5)), (0.4, 1.0, 6.0), (1.0, 1.0, -1.0))
    assert found["policy/clip_fraction_low"] == [1, 0, 0]
    assert found["policy/clip_fraction_high"] == [0, 0, 1]


def test_a_huge_difference_from_the_old_policy_stays_finite(case: Case) -> None:
    tokens = some_tokens(1)
    columns = {**tokens.columns, "old_logprobs": tokens.x - 1e4, "reference_logprobs": tokens.x + 1e4}
    inputs = Tokens(tokens.x, columns, tokens.entropy, tokens.segments).inputs(case.loss)
    loss = case.loss.token_loss(inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.logprobs)
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(gradient).all())
