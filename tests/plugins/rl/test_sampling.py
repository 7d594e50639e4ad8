"""Drawing a token: the right distribution, the right logprobs, and nothing of a row's neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spurline_rl.engines.in_process.sampling import sample, uniform
from spurline_rl.protocols.rollout_engine import Sampling

JUST_BELOW_ONE = 1 - 2.0**-52


def random_logits(rows: int, size: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def expected_distribution(logits: NDArray[np.float64], setting: Sampling) -> NDArray[np.float64]:
    """In plain numpy, token after token: probabilities that sampling must have."""
    scaled = logits / (setting.temperature or 1.0)
    likeliest_first = np.argsort(-scaled, kind="stable")
    if setting.top_k:
        worst = scaled[likeliest_first[: setting.top_k]].min()
        scaled = np.where(scaled < worst, -np.inf, scaled)
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    kept, mass = [], 0.0
    for token in likeliest_first:
        if mass < setting.top_p or setting.top_p == 1:
            kept.append(token)
        mass += probabilities[token]
    mask = np.zeros(len(logits))
    mask[kept] = 1
    return probabilities * mask / (probabilities * mask).sum()


@pytest.mark.parametrize(
    "setting",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=3),
        Sampling(top_p=0.8),
        Sampling(temperature=1.3, top_k=9, top_p=0.6),
        Sampling(top_k=1),
        Sampling(top_k=10_000),
        Sampling(top_p=1e-9),
    ],
    ids=str,
)
def test_every_token_has_the_logprob_of_the_distribution_and_is_drawn_as_often(setting: Sampling) -> None:
    for seed in range(4):
        logits = random_logits(1, 23, seed)
        expected = expected_distribution(logits[0].double().numpy(), setting)
        draws = 4096
        # Evenly spaced random numbers hit each token in proportion to its probability, up to one draw at each edge.
        points = [(number + 0.5) / draws for number in range(draws)]
        width = setting.top_k + 2
        drawn = sample(logits.expand(draws, -1), [replace(setting, support_width=width)] * draws, points)
        kept = np.flatnonzero(expected).tolist()
        # Where more tokens were kept than there are columns, none is reported.
        kept = [-1] * width if len(kept) > width else kept + [-1] * (width - len(kept))
        assert all(row is not None and sorted(row.tolist()) == sorted(kept) for row in drawn.supports)
        counts = np.bincount(drawn.tokens, minlength=23)
        assert np.abs(counts - draws * expected).max() <= 1.01
        assert not counts[expected == 0].any()
        assert np.allclose(drawn.logprobs, np.log(expected[drawn.tokens]), atol=2e-6)


def test_equal_logits_at_the_edge_of_top_k_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    points = [number / 500 for number in range(500)]
    drawn = sample(logits.expand(500, -1), [Sampling(top_k=2)] * 500, points)
    assert set(drawn.tokens) == {1, 2, 3}


def test_greedy_takes_the_likeliest_token_with_the_models_own_logprob() -> None:
    logits = random_logits(5, 40, 0)
    drawn = sample(logits, [Sampling(temperature=0, top_k=3, top_p=0.1)] * 5, [0.99] * 5)
    assert drawn.tokens == logits.argmax(-1).tolist()
    assert np.allclose(drawn.logprobs, logits.log_softmax(-1).max(-1).values)


def test_a_row_is_the_same_alone_and_among_neighbours_with_other_settings() -> None:
    random = np.random.default_rng(0)
    settings = [
        Sampling(temperature=float(random.choice([0, 0.5, 1, 2])), top_k=int(random.choice([0, 0, 5])), top_p=top_p)
        for top_p in random.choice([1.0, 1.0, 0.7], 60).tolist()
    ]
    logits = random_logits(60, 273, 1)
    points = random.random(60).tolist()
    together = sample(logits, settings, points)
    for row in range(60):
        alone = sample(logits[row : row + 1], settings[row : row + 1], points[row : row + 1])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]


@pytest.mark.parametrize("point", [0.0, JUST_BELOW_ONE])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 30.0])
def test_the_extreme_random_numbers_never_hit_an_impossible_token(point: float, scale: float) -> None:
    logits = scale * random_logits(50, 31, 2)
    logits[:, [0, 7, 30]] = -torch.inf
    drawn = sample(logits, [Sampling()] * 50, [point] * 50)
    assert not {0, 7, 30} & set(drawn.tokens)
    assert np.isfinite(drawn.logprobs).all()


def test_half_precision_logits_are_scored_in_single_precision() -> None:
    logits = random_logits(8, 4000, 3).bfloat16()
    drawn = sample(logits, [Sampling()] * 8, [0.5] * 8)
    expected = logits.double().log_softmax(-1)[torch.arange(8), drawn.tokens]
    assert np.abs(np.array(drawn.logprobs) - expected.numpy()).max() <= 2e-6


def test_logits_that_are_not_numbers_give_logprobs_that_are_not() -> None:
    logits = random_logits(2, 9, 4)
    logits[1, 3] = torch.nan
    drawn = sample(logits, [Sampling()] * 2, [0.3, 0.9])
    assert np.isfinite(drawn.logprobs).tolist() == [True, False]


def test_random_numbers_depend_on_seed_and_position_alone_and_fill_the_unit_interval() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    assert numbers.tolist() == [[uniform(seed, position) for position in range(200)] for seed in range(200)]
    assert len(np.unique(numbers)) == numbers.size
    assert 0 <= numbers.min() < 1e-3 < 1 - 1e-3 < numbers.max() < 1
    shares = np.bincount((numbers * 10).astype(int).ravel(), minlength=10) / numbers.size
    assert np.abs(shares - 0.1).max() < 0.01
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02
    assert uniform(2**63 - 1, 0) != uniform(-1, 0)
