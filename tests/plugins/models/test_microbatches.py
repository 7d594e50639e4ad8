"""Rows are cut into micro-batches, and micro-batches laid out as streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import lay_out, make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline_models.device_profile import device_profile
from spurline_models.local.backend import cut_rows
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.streams.token_stream import token_stream

PROFILE = device_profile("cpu")


def test_columns_keep_their_dtype_while_a_float64_model_computes() -> None:
    double = device_profile("cpu", "fp64")
    with double.computing():
        assert double.take(torch.tensor([1.5, 2.5]), torch.tensor([1])).dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[0, 1, 2, 3]]),
        ({"rows_per_microbatch": 1}, [[0], [1], [2], [3]]),
        ({"rows_per_microbatch": 3}, [[0, 1, 2], [3]]),
        ({"max_tokens_per_microbatch": 10}, [[0, 1], [2], [3]]),
        ({"max_tokens_per_microbatch": 13}, [[0, 1], [2, 3]]),
        ({"max_tokens_per_microbatch": 1}, [[0], [1], [2], [3]]),
    ],
)
def test_rows_fill_microbatches_up_to_the_limit(settings: dict[str, Any], expected: list[list[int]]) -> None:
    batch = lay_out(make_samples([4, 6, 9, 3]), length=50, padding_rows=2)
    assert [rows.tolist() for rows in cut_rows(batch, LocalBackendConfig(**settings))] == expected


def test_rows_of_one_unit_stay_together_wherever_they_stand() -> None:
    batch = lay_out(make_samples([4, 4, 4, 4, 4]), unit_ids=[7, 3, 7, 3, 9])
    groups = cut_rows(batch, LocalBackendConfig(rows_per_microbatch=1))
    assert [rows.tolist() for rows in groups] == [[0, 2], [1, 3], [4]]
    groups = cut_rows(batch, LocalBackendConfig(rows_per_microbatch=3))
    assert [rows.tolist() for rows in groups] == [[0, 2], [1, 3, 4]]


def test_a_stream_of_all_rows_in_another_order_keeps_each_token_in_its_own_segment() -> None:
    samples = make_samples([5, 9, 7, 12])
    stream = token_stream(lay_out(samples), np.array([0, 2, 1, 3]), [], PROFILE)
    assert stream is not None
    by_length = sorted(samples, key=lambda sample: len(sample.tokens))
    assert stream.input_ids[0].tolist() == [token for sample in by_length for token in sample.tokens]
    assert stream.position_ids[0].tolist() == [position for length in (5, 7, 9, 12) for position in range(length)]


@settings(max_examples=40)
@given(data=st.data(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_stream_holds_each_chosen_token_once_with_its_own_predecessor(
    data: st.DataObject, lengths: list[int]
) -> None:
    samples = make_samples(lengths, data.draw(st.integers(0, 99)), loss_share=1.1)
    batch = lay_out(samples, gap=data.draw(st.integers(0, 2)), left=data.draw(st.booleans()), length=15)
    numbered = torch.arange(batch.num_rows * batch.length, dtype=torch.float32).view(batch.num_rows, batch.length)
    batch = batch.with_tokens(advantages=numbered)
    rows = np.asarray(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))), dtype=np.int64)
    stream = token_stream(batch, rows, ["advantages"], PROFILE)
    weights = batch.tokens["loss_weights"][torch.from_numpy(rows)]
    if stream is None:
        assert not bool(weights.any())
        return
    assert stream.num_tokens == sum(lengths[row] for row in rows)
    assert stream.num_loss_tokens == int(torch.count_nonzero(weights))
    assert stream.plan.num_segments == len(rows)
    assert torch.equal(stream.columns["advantages"], stream.batch_index.float())
    tokens, positions = (batch.tokens[name].flatten() for name in ("input_ids", "position_ids"))
    assert torch.equal(stream.targets, tokens[stream.batch_index])
    assert torch.equal(stream.input_ids[0, stream.source + 1], stream.targets)
    assert torch.equal(stream.input_ids[0, stream.source], tokens[stream.batch_index - 1])
    assert torch.equal(stream.position_ids[0, stream.source], positions[stream.batch_index] - 1)
    segment_of_row = stream.batch_index // batch.length
    assert len(set(zip(segment_of_row.tolist(), stream.segment_index.tolist(), strict=True))) == len(
        set(segment_of_row.tolist())
    )
