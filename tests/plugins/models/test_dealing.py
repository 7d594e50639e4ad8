"""Rows are dealt to ranks and micro-batches so that all take about equally long, and come back in order."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.batch import TOKEN_COLUMNS, Ragged, TrainingBatch
from spurline.testing.fuzzing import fuzzing
from spurline.testing.samples import check_batch
from spurline_models.dealing import Dealing, RankShare, deal

HIDDEN = 8


def batch_of(lengths: list[int], units: list[int] | None = None, padding_rows: int = 0) -> TrainingBatch:
    """One segment per row; the token at each place says which row it is in, `advantages` too."""
    rows, length = len(lengths), max([1, *lengths])
    inside = torch.arange(length) < torch.tensor(lengths).reshape(rows, 1)
    number = torch.arange(rows).unsqueeze(1).expand(rows, length)
    batch = TrainingBatch(
        tokens={
            "input_ids": torch.where(inside, number, 0),
            "segment_ids": inside.int(),
            "position_ids": torch.where(inside, torch.arange(length), 0),
            "loss_weights": (inside & (torch.arange(length) > 0)).float(),
            "advantages": torch.where(inside, number, 0).float(),
            "returns": torch.zeros(rows, length),
        },
        segments={
            "uid": Ragged.from_rows([[f"row-{row}"] for row in range(rows)], object),
            "sample": Ragged.from_rows([[0]] * rows, np.int32),
            "turn": Ragged.from_rows([[0]] * rows, np.int32),
            "length": Ragged.from_rows([[size] for size in lengths], np.int32),
        },
        unit_ids=torch.arange(rows) if units is None else torch.tensor(units, dtype=torch.int64),
        is_padding_row=torch.zeros(rows, dtype=torch.bool),
    )
    batch = batch.pad_rows(rows + padding_rows) if padding_rows else batch
    check_batch(batch)
    return batch


@st.composite
def batches(draw: st.DrawFn) -> TrainingBatch:
    lengths = draw(st.lists(st.integers(1, 40), min_size=0, max_size=24))
    units = [draw(st.integers(0, 9)) for _ in lengths]
    return batch_of(lengths, units, draw(st.integers(0, 3)) if lengths else 0)


def tokens_of(share: RankShare) -> list[int]:
    """Tokens of each micro-batch."""
    lengths = share.batch.segments["length"]
    return [int(lengths.take(rows).values.sum()) for rows in share.microbatches]


def units_of(dealing: Dealing) -> list[list[set[int]]]:
    """Units of each micro-batch of each rank."""
    return [[set(share.batch.unit_ids[rows].tolist()) for rows in share.microbatches] for share in dealing.shares]


@given(batch=batches(), ranks=st.integers(1, 6), max_tokens=st.none() | st.integers(1, 120))
@fuzzing(200)
def test_every_real_row_is_in_one_microbatch_and_its_unit_is_whole(
    batch: TrainingBatch, ranks: int, max_tokens: int | None
) -> None:
    dealing = deal(batch, ranks, max_tokens=max_tokens, hidden=HIDDEN)
    assert len(dealing.shares) == ranks
    real = torch.nonzero(~batch.is_padding_row).flatten()
    dealt = [share.rows[rows] for share in dealing.shares for rows in share.microbatches]
    assert sorted(np.concatenate([*dealt, np.zeros(0, np.int64)]).tolist()) == real.tolist()
    for share in dealing.shares:
        for name, column in share.batch.tokens.items():
            assert torch.equal(column, batch.tokens[name][torch.from_numpy(share.rows)]), name
        assert sorted(np.concatenate([*share.microbatches, np.zeros(0, np.int64)]).tolist()) == [
            *range(share.batch.num_rows)
        ]
    places = [units for rank in units_of(dealing) for units in rank]
    assert sum(len(units) for units in places) == len(set(batch.unit_ids[real].tolist()))


@given(batch=batches(), ranks=st.integers(1, 6), max_tokens=st.none() | st.integers(1, 120))
@fuzzing(200)
def test_all_ranks_have_equally_many_microbatches_and_none_is_too_full_but_with_one_large_unit(
    batch: TrainingBatch, ranks: int, max_tokens: int | None
) -> None:
    dealing = deal(batch, ranks, max_tokens=max_tokens, hidden=HIDDEN)
    counts = {len(share.microbatches) for share in dealing.shares}
    assert counts == {dealing.costs.shape[1]}
    if max_tokens is None:
        assert counts == ({1} if (~batch.is_padding_row).any() else {0})
        return
    for share, units in zip(dealing.shares, units_of(dealing), strict=True):
        for tokens, inside in zip(tokens_of(share), units, strict=True):
            assert tokens <= max_tokens or len(inside) == 1


@given(batch=batches(), ranks=st.integers(1, 6), max_tokens=st.none() | st.integers(1, 120))
@fuzzing(100)
def test_values_computed_by_ranks_come_back_to_their_rows(
    batch: TrainingBatch, ranks: int, max_tokens: int | None
) -> None:
    dealing = deal(batch, ranks, columns=["advantages"], max_tokens=max_tokens, hidden=HIDDEN)
    computed = [share.batch.tokens["advantages"].numpy() for share in dealing.shares]
    expected = batch.without_padding_rows().tokens["advantages"]
    assert torch.equal(dealing.gather(computed), expected)


@given(batch=batches(), ranks=st.integers(1, 6), max_tokens=st.none() | st.integers(1, 120))
@fuzzing(50)
def test_a_share_crosses_a_pipe_as_plain_arrays_and_equal_rows_are_dealt_equally(
    batch: TrainingBatch, ranks: int, max_tokens: int | None
) -> None:
    alike = (batch, batch.without_padding_rows())
    first, second = (deal(each, ranks, columns=["advantages"], max_tokens=max_tokens) for each in alike)
    for sent, again in zip(first.shares, second.shares, strict=True):
        wire = pickle.loads(pickle.dumps(sent.to_wire()))  # noqa: S301 - what a pipe does, with our own bytes
        arrays = [*wire["tokens"].values(), *wire["microbatches"], wire["lengths"], wire["unit_ids"], wire["rows"]]
        assert all(isinstance(array, np.ndarray) and array.flags.c_contiguous for array in arrays)
        received = RankShare.from_wire(wire)
        assert received.batch.num_rows == again.batch.num_rows
        assert set(received.batch.tokens) == {*TOKEN_COLUMNS, "advantages"}
        assert set(received.batch.segments) == {"length"}
        for name, column in received.batch.tokens.items():
            assert torch.equal(column, again.batch.tokens[name])
        assert np.array_equal(received.batch.segments["length"].values, again.batch.segments["length"].values)
        assert np.array_equal(received.rows, again.rows)
        for got, wanted in zip(received.microbatches, again.microbatches, strict=True):
            assert np.array_equal(got, wanted)


def test_ranks_without_rows_are_idle_in_as_many_microbatches_as_the_others_have() -> None:
    dealing = deal(batch_of([30, 20]), 4, max_tokens=30, hidden=HIDDEN)
    assert dealing.costs.shape[1] == 1
    assert sum(len(rows) == 0 for share in dealing.shares for rows in share.microbatches) == 2
    assert [share.batch.num_rows for share in dealing.shares] == [1, 1, 0, 0]
    one_unit = deal(batch_of([10, 10, 10], units=[0, 0, 0]), 2, max_tokens=10, hidden=HIDDEN)
    assert units_of(one_unit) == [[{0}], [set()]]


@pytest.mark.parametrize(("rows", "ranks", "limit"), [(256, 8, 8192), (1024, 64, 16384)])
def test_lognormal_lengths_are_dealt_within_three_percent_of_ideal(rows: int, ranks: int, limit: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(5):
        lengths = np.clip(random.lognormal(np.log(500) - 0.405, 0.9, rows), 16, 4096).astype(int)
        dealing = deal(batch_of(lengths.tolist()), ranks, max_tokens=limit)
        # Ranks wait for each other in every micro-batch.
        assert dealing.costs.max(axis=0).sum() <= 1.03 * dealing.costs.sum() / ranks
        assert max(max(tokens_of(share)) for share in dealing.shares) <= limit
