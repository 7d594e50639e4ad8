"""Packed attention equals attention on each sequence alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spurline.errors import ModelError
from spurline_models.streams.segment_attention import Scores, attend_segments, segment_attention
from spurline_models.streams.token_stream import plan_segments

NEVER_PAD, ALWAYS_PAD = 0, 10**9
HEADS, HEAD_SIZE = 4, 8


def plan(lengths: list[int], slots_per_call: int) -> Any:
    return plan_segments(np.sort(np.asarray(lengths, dtype=np.int64)), slots_per_call, lambda tensor: tensor)


def projections(tokens: int, key_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        # [1, heads, T, D] as a view of [1, T, heads, D], the way models hand it over.
        torch.randn(1, tokens, heads, HEAD_SIZE, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, key_heads, key_heads)
    ]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scores: Scores) -> Tensor:
    """Softmax attention written out, with loops over segments and repeated key heads."""
    outputs, start = [], 0
    groups = query.shape[1] // key.shape[1]
    for length in sorted(lengths):
        where = slice(start, start + length)
        q, k, v = query[:, :, where], key[:, :, where], value[:, :, where]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = (distance >= 0) & (distance < (scores.window or length))
        weights = q @ k.transpose(-1, -2) * 0.3
        shares = weights.masked_fill(~seen, -torch.inf).exp()
        sinks = 0.0 if scores.sinks is None else scores.sinks.exp().view(1, -1, 1, 1)
        outputs.append((shares / (shares.sum(-1, keepdim=True) + sinks) @ v).transpose(1, 2))
        start += length
    return torch.cat(outputs, dim=1)


SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0], dtype=torch.float64)


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    key_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 2, 5, 19, 64]),
    has_sinks=st.booleans(),
    slots_per_call=st.sampled_from([NEVER_PAD, 16, 64, ALWAYS_PAD]),
)
def test_packed_attention_equals_each_segment_alone_in_values_and_gradients(
    lengths: list[int], key_heads: int, window: int | None, has_sinks: bool, slots_per_call: int
) -> None:
    inputs = projections(sum(lengths), key_heads)
    sinks = SINKS.clone().requires_grad_() if has_sinks else None
    output, _ = segment_attention(
        nn.Module(),
        *inputs,
        None,
        scaling=0.3,
        sliding_window=window,
        s_aux=sinks,
        segment_plan=plan(lengths, slots_per_call),
    )
    expected = one_by_one(*inputs, lengths, Scores(0.3, sinks, window))
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    direction = torch.randn_like(expected)
    taken = [*inputs, *([] if sinks is None else [sinks])]
    got = torch.autograd.grad(output, taken, direction)
    wanted = torch.autograd.grad(expected, taken, direction)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "scores", [Scores(window=8), Scores(window=8, sinks=SINKS)], ids=["window", "window and sinks"]
)
def test_nothing_that_grows_with_the_square_of_a_segment_is_kept_for_the_backward_pass(
    scores: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 512
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inputs = (part.squeeze(0).transpose(0, 1) for part in projections(length, 2))
        attend_segments(*inputs, plan([length], NEVER_PAD), scores)
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    # One number of each pair of a query and a key, for one of the heads.
    assert sum(memory.values()) < 8 * length**2


def test_rows_are_not_kept_beside_their_padded_copies_for_the_backward_pass() -> None:
    lengths, kept = [3, 5, 4], set[int]()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    inputs = [part.squeeze(0).transpose(0, 1).contiguous() for part in projections(sum(lengths), 2)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend_segments(*inputs, plan(lengths, ALWAYS_PAD), Scores())
    assert not kept & {part.data_ptr() for part in inputs}


def test_a_batch_of_rows_is_the_stream_of_its_rows() -> None:
    inputs = projections(12, 2)
    rows = [part.transpose(1, 2).unflatten(1, (3, 4)).squeeze(0).transpose(1, 2) for part in inputs]
    output, _ = segment_attention(nn.Module(), *rows, None, segment_plan=plan([4, 4, 4], NEVER_PAD))
    expected, _ = segment_attention(nn.Module(), *inputs, None, segment_plan=plan([4, 4, 4], NEVER_PAD))
    assert torch.equal(output.flatten(0, 1), expected.squeeze(0))


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 40), max_size=20), slots_per_call=st.integers(0, 400))
def test_buckets_cover_the_stream_in_order(lengths: list[int], slots_per_call: int) -> None:
    made = plan(lengths, slots_per_call)
    assert sum(bucket.tokens for bucket in made.buckets) == sum(lengths)
    assert sum(bucket.count for bucket in made.buckets) == made.num_segments == len(lengths)
    assert made.cu_seqlens.tolist() == [0, *np.cumsum(sorted(lengths)).tolist()]
    assert all(one.length <= other.length for one, other in pairwise(made.buckets))


def test_dropout_drops_attention_at_the_given_rate() -> None:
    query, key, _ = projections(400, HEADS, torch.float32)
    torch.manual_seed(0)
    output, _ = segment_attention(
        nn.Module(), query, key, torch.ones_like(key), None, dropout=0.5, segment_plan=plan([100] * 4, NEVER_PAD)
    )
    # Rows of softmax sum to 1; after dropout they still do on average.
    assert 0.9 < output.mean().item() < 1.1
    assert output.std().item() > 0.05


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position_bias": torch.zeros(HEADS)}, "position_bias"),
        ({"block_indices": torch.zeros(1, 4, 2, dtype=torch.int64)}, "block_indices"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_attention_that_is_not_computed_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        segment_attention(nn.Module(), *projections(4, 4), None, segment_plan=plan([4], 0), **kwargs)


def test_a_model_that_drops_keyword_arguments_is_refused() -> None:
    with pytest.raises(ModelError, match="does not pass the model's keyword arguments"):
        segment_attention(nn.Module(), *projections(4, 4), None)
