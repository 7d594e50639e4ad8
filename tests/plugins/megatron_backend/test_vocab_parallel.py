"""Scores of a divided vocabulary are those of the whole, in values and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_layer_workers import loss_of
from read_distributions import expected_values, total_of
from torch import nn

from spurline.protocols.ranks import RankRequest
from spurline_models.streams.token_logprobs import TokenLogprobs
from spurline_ranks.group import RankGroup, TimeLimits, open_ranks

pytestmark = pytest.mark.processes

HIDDEN = 6
ALL_AT_ONCE = 4096


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    request = RankRequest(4, num_threads=1)
    group = open_ranks(request, "megatron_layer_workers:VocabularyRank", (1, 2, 4), TimeLimits(120, 60, 60))
    yield group
    group.close()


def inputs(tokens: int, vocabulary: int, dtype: type, scale: float = 1.0) -> tuple[Any, Any, Any]:
    """Hidden states, weight of the output layer, and targets, with those at the borders of ranks among them."""
    generator = np.random.default_rng(tokens * 100 + vocabulary)
    hidden = (generator.standard_normal((tokens, HIDDEN)) * scale).astype(dtype)
    weight = generator.standard_normal((vocabulary, HIDDEN)).astype(dtype)
    targets = generator.integers(vocabulary, size=tokens)
    targets[: min(tokens, 2)] = [0, vocabulary - 1][: min(tokens, 2)]
    return hidden, weight, targets


def kept(targets: Any, vocabulary: int) -> Any:
    """Ids of the tokens that sampling kept, padded with -1: about a third of them, and the target."""
    chosen = np.random.default_rng(len(targets)).random((len(targets), vocabulary)) < 0.3
    chosen[np.arange(len(targets)), targets] = True
    return np.where(chosen, np.arange(vocabulary), -1)


def expected(
    hidden: Any, weight: Any, targets: Any, want_entropy: bool, temperature: float, support: Any = None
) -> dict[str, Any]:
    """Softmax written out."""
    states, layer = torch.from_numpy(hidden).requires_grad_(), torch.from_numpy(weight).requires_grad_()
    logits = states @ layer.T / temperature
    everything = logits.log_softmax(-1)
    cut = everything if support is None else logits.masked_fill(torch.from_numpy(support) < 0, -torch.inf)
    logprobs = cut.log_softmax(-1)[torch.arange(len(targets)), torch.from_numpy(targets)]
    entropy = -(everything.exp() * everything).sum(-1) if want_entropy else None
    gradients = torch.autograd.grad(loss_of(logprobs, entropy), [states, layer])
    return {
        "logprobs": logprobs.detach().numpy(),
        "entropy": None if entropy is None else entropy.detach().numpy(),
        "hidden": gradients[0].numpy(),
        "weight": gradients[1].numpy(),
    }


def assert_equal(answers: list[dict[str, Any]], wanted: dict[str, Any], size: int, tolerance: float) -> None:
    vocabulary = len(wanted["weight"])
    rows = -(-vocabulary // size)
    for rank, answer in enumerate(answers):
        for name in ("logprobs", "entropy", "hidden"):
            if wanted[name] is not None:
                largest = max(1.0, float(np.abs(wanted[name]).max(initial=0)))
                np.testing.assert_allclose(answer[name], wanted[name], rtol=tolerance, atol=tolerance * largest)
        first = rank % size * rows
        own = wanted["weight"][first : first + rows]
        largest = max(1.0, float(np.abs(wanted["weight"]).max(initial=0)))
        np.testing.assert_allclose(answer["weight"][: len(own)], own, rtol=tolerance, atol=tolerance * largest)
        assert not answer["weight"][len(own) :].any(), "rows of padding have a gradient"


@settings(max_examples=60)
@given(
    size=st.sampled_from([1, 2, 4]),
    tokens=st.integers(0, 9),
    # 5 of 4 ranks: the last has padding alone.
    vocabulary=st.sampled_from([4, 5, 7, 8, 19, 64]),
    chunk_tokens=st.sampled_from([1, 2, 4, ALL_AT_ONCE]),
    want_entropy=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    is_cut=st.booleans(),
)
def test_scores_and_gradients_are_those_of_the_whole_vocabulary(
    ranks: RankGroup,
    size: int,
    tokens: int,
    vocabulary: int,
    chunk_tokens: int,
    want_entropy: bool,
    temperature: float,
    is_cut: bool,
) -> None:
    given_ = inputs(tokens, vocabulary, np.float64)
    support = kept(given_[2], vocabulary) if is_cut else None
    answers = ranks.call("scores", size, *given_, chunk_tokens, want_entropy, temperature, False, support)
    assert_equal(answers, expected(*given_, want_entropy, temperature, support), size, 1e-12)
    # Logits of more than a chunk never exist; all chunks but the last are computed twice, as in the local backend.
    chunks = max(1, math.ceil(tokens / chunk_tokens))
    assert all(max(answer["computed"]) <= chunk_tokens for answer in answers)
    assert all(len(answer["computed"]) == 2 * chunks - 1 for answer in answers)


@settings(max_examples=25)
@given(
    size=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 9),
    # Tokens of the trained model, and of the other. Of 4 ranks, the last may have padding alone.
    sizes=st.sampled_from([(5, 5), (8, 8), (19, 19), (19, 23), (64, 61), (8, 5)]),
    chunk_tokens=st.sampled_from([1, 4, ALL_AT_ONCE]),
)
def test_a_loss_reads_the_distributions_of_the_whole_vocabulary(
    ranks: RankGroup, size: int, tokens: int, sizes: tuple[int, int], chunk_tokens: int
) -> None:
    (hidden, weight, targets), other = (inputs(tokens, vocabulary, np.float64) for vocabulary in sizes)
    targets = targets % min(sizes)
    answers = ranks.call("read", size, hidden, weight, targets, other[:2], chunk_tokens)
    states, layer = torch.from_numpy(hidden).requires_grad_(), torch.from_numpy(weight).requires_grad_()
    own = states @ layer.T / 0.7
    scale = torch.linspace(0.5, 1, tokens, dtype=torch.float64)
    values = expected_values(
        own, torch.from_numpy(other[0]) @ torch.from_numpy(other[1]).T / 0.7, torch.from_numpy(targets), scale
    )
    everything = own.log_softmax(-1)
    logprobs = everything[torch.arange(tokens), torch.from_numpy(targets)]
    total = total_of(values, logprobs, -(everything.exp() * everything).sum(-1))
    gradients = torch.autograd.grad(total, [states, layer])
    rows = -(-sizes[0] // size)
    for rank, answer in enumerate(answers):
        for name, value in values.items():
            np.testing.assert_allclose(answer[name], value.detach().numpy(), rtol=1e-11, atol=1e-11, err_msg=name)
        np.testing.assert_allclose(answer["hidden"], gradients[0].numpy(), rtol=1e-9, atol=1e-9)
        own_rows = gradients[1].numpy()[rank % size * rows :][:rows]
        np.testing.assert_allclose(answer["weight"][: len(own_rows)], own_rows, rtol=1e-9, atol=1e-9)
        assert not answer["weight"][len(own_rows) :].any(), "rows of padding have a gradient"


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_single_precision_is_exact_to_its_last_digits_for_large_logits_too(
    ranks: RankGroup, size: int, scale: float
) -> None:
    given_ = inputs(50, 131, np.float32, scale)
    wanted = expected(
        *(value.astype(np.float64) if value.dtype == np.float32 else value for value in given_), True, 1.0
    )
    answers = ranks.call("scores", size, *given_, 16, True, 1.0, False)
    assert all(answer["dtype"] == "torch.float32" for answer in answers)
    assert_equal(answers, wanted, size, 1e-6 * max(1.0, scale / 10))


@pytest.mark.parametrize("want_entropy", [False, True])
def test_half_precision_logits_are_scored_in_single_precision_as_by_the_local_backend(
    ranks: RankGroup, want_entropy: bool
) -> None:
    hidden, weight, targets = inputs(30, 200, np.float32)
    answers = ranks.call("scores", 2, hidden, weight, targets, 7, want_entropy, 0.8, True)
    head = nn.Linear(HIDDEN, 200, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(weight))
    states = torch.from_numpy(hidden).to(torch.bfloat16)
    logprobs, entropy = TokenLogprobs(head, 7)(states, torch.from_numpy(targets), want_entropy, 0.8)
    for answer in answers:
        assert answer["dtype"] == "torch.float32"
        np.testing.assert_allclose(answer["logprobs"], logprobs.detach().numpy(), rtol=2e-6, atol=2e-6)
        if entropy is not None:
            np.testing.assert_allclose(answer["entropy"], entropy.detach().numpy(), rtol=2e-6, atol=2e-6)
