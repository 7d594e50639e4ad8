"""TrainingBatch: whatever is done to rows is done to everything that belongs to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PackedCollator
from spurline.data.configs import PackedCollatorConfig
from spurline.errors import DataError
from spurline.protocols.collator import ParallelLayout
from spurline.testing.collator_contract import assert_batches_equal
from spurline.testing.samples import PAD, check_batch, make_view

lengths_strategy = st.lists(st.integers(1, 20), min_size=1, max_size=15)


def packed(lengths: list[int], max_tokens: int = 40) -> TrainingBatch:
    collator = PackedCollator(PackedCollatorConfig(max_tokens=max_tokens), PAD, ParallelLayout())
    return collator.collate(make_view(lengths), training=True)


def row_contents(batch: TrainingBatch, row: int) -> tuple[list[int], list[str], int]:
    return batch.tokens["input_ids"][row].tolist(), batch.segments["uid"][row].tolist(), int(batch.unit_ids[row])


@given(lengths=lengths_strategy, data=st.data())
@settings(deadline=None, max_examples=50)
def test_taking_rows_takes_tokens_metadata_and_units_together(lengths: list[int], data: st.DataObject) -> None:
    batch = packed(lengths)
    rows = data.draw(st.lists(st.integers(0, batch.num_rows - 1), max_size=8))
    taken = batch.take(rows)
    check_batch(taken)
    assert [row_contents(taken, i) for i in range(len(rows))] == [row_contents(batch, row) for row in rows]


@given(lengths=lengths_strategy, data=st.data())
@settings(deadline=None, max_examples=50)
def test_rows_between_two_are_those_rows_in_the_same_memory(lengths: list[int], data: st.DataObject) -> None:
    batch = packed(lengths)
    start = data.draw(st.integers(0, batch.num_rows))
    stop = data.draw(st.integers(start, batch.num_rows))
    between = batch.between(start, stop)
    assert_batches_equal(between, batch.take(range(start, stop)))
    for name, column in between.tokens.items():
        assert column.untyped_storage().data_ptr() == batch.tokens[name].untyped_storage().data_ptr(), name


@given(lengths=lengths_strategy, multiple=st.integers(1, 7))
@settings(deadline=None, max_examples=50)
def test_padding_rows_come_and_go_without_a_trace(lengths: list[int], multiple: int) -> None:
    batch = packed(lengths)
    padded = batch.pad_rows(multiple)
    check_batch(padded)
    assert padded.num_rows % multiple == 0
    assert padded.num_tokens == batch.num_tokens
    assert len(set(padded.unit_ids.tolist())) == padded.num_rows
    assert_batches_equal(padded.without_padding_rows(), batch)
    assert torch.equal(padded.drop_padding_rows(padded.tokens["input_ids"]), batch.tokens["input_ids"])


def test_release_gives_buffers_back_once_and_not_for_copies() -> None:
    released: list[str] = []
    batch = packed([3, 4])
    owner = TrainingBatch(**{**vars(batch), "on_release": lambda: released.append("buffers")})
    owner.take([0]).release()
    owner.pad_rows(4).release()
    assert released == []
    owner.release()
    assert released == ["buffers"]


def test_what_is_wrong_in_a_batch_is_found() -> None:
    batch = packed([3, 3], max_tokens=10).pad_rows(2)
    ids, weights = batch.tokens["segment_ids"], batch.tokens["loss_weights"]
    swapped = torch.where(ids == 1, 2, torch.where(ids == 2, 1, ids)).to(ids.dtype)
    with pytest.raises(AssertionError, match="row 0: segment 2 lies before segment 1"):
        check_batch(batch.with_tokens(segment_ids=swapped))
    for row, told in ((0, "first token"), (1, "padding")):
        wrong = weights.clone()
        wrong[row, 0] = 1.0
        with pytest.raises(AssertionError, match=told):
            check_batch(batch.with_tokens(loss_weights=wrong))


def test_a_sample_that_cannot_fit_a_packed_row_is_named() -> None:
    with pytest.raises(DataError, match=r"random:1 has 41 tokens.*max_tokens"):
        packed([5, 41])
