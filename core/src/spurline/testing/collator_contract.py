"""Check that a collator keeps its contract and builds the same batches as core's reference collator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.batch import MAY_BE_WIDE, TrainingBatch
from spurline.protocols.collator import Collator, ParallelLayout
from spurline.testing.fuzzing import fuzzing
from spurline.testing.samples import check_batch, make_store, make_view

PAD = 999
"""Padding token. It is not 0, so that tests notice a column of zeros. No sample contains it."""

lengths_strategy = st.lists(st.integers(1, 60), max_size=24)
layout_strategy = st.builds(
    ParallelLayout,
    data=st.integers(1, 5),
    tensor=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2]),
    fp8=st.booleans(),
)


class CollatorContract:
    """A suite of tests for collators. Write a subclass with `make_collator(pad_token_id, layout)`.

    The collator must take samples of up to 60 tokens. If `make_reference` returns core's collator with the same
    settings, every column is compared bit for bit.
    """

    def make_collator(self, pad_token_id: int, layout: ParallelLayout) -> Collator:
        """Return your collator."""
        raise NotImplementedError("subclass CollatorContract with make_collator(self, pad_token_id, layout)")

    def make_reference(self, pad_token_id: int, layout: ParallelLayout) -> Collator | None:
        """Return core's collator with the same settings, or None to check the invariants only."""
        return None

    @given(lengths=lengths_strategy, layout=layout_strategy, seed=st.integers(0, 9), training=st.booleans())
    @fuzzing(40)
    def test_every_sample_is_in_exactly_one_segment_and_the_rest_is_empty(
        self, lengths: list[int], layout: ParallelLayout, seed: int, training: bool
    ) -> None:
        samples = make_view(lengths, seed)
        batch = self.make_collator(PAD, layout).collate(samples, training=training)
        check_batch(batch)
        contents = [(uid, tokens, weights) for uid, _, _, tokens, weights in turns_in(batch)]
        assert sorted(contents) == sorted(
            (samples.uid(i), samples.tokens(i).tolist(), [0.0, *samples.loss_mask(i)[1:].astype(float).tolist()])
            for i in range(len(samples))
        )
        padding = batch.tokens["segment_ids"] == 0
        assert not training or batch.num_rows % layout.data == 0
        assert bool((batch.tokens["input_ids"][padding] == PAD).all())
        for name in ("position_ids", "loss_weights"):
            assert bool((batch.tokens[name][padding] == 0).all()), name
        assert batch.info["packing/fill"] == pytest.approx(float((~padding).float().mean()), abs=1e-6)

    @given(lengths=lengths_strategy, layout=layout_strategy)
    @fuzzing(20)
    def test_segments_start_at_multiples_of_the_alignment(self, lengths: list[int], layout: ParallelLayout) -> None:
        batch = self.make_collator(PAD, layout).collate(make_view(lengths), training=True)
        assert batch.length % layout.align_to == 0
        for row in range(batch.num_rows):
            count = len(batch.segments["length"][row])
            # A segment that is alone in its row may start anywhere, for example after padding on the left.
            for segment in range(1, count + 1) if count > 1 else ():
                start = int(torch.nonzero(batch.tokens["segment_ids"][row] == segment)[0])
                assert start % layout.align_to == 0, f"row {row}: segment {segment} starts at {start}"

    @given(lengths=lengths_strategy, seed=st.integers(0, 9))
    @fuzzing(10)
    def test_collating_twice_gives_the_same_batch(self, lengths: list[int], seed: int) -> None:
        collator = self.make_collator(PAD, ParallelLayout(data=2))
        first = clone(collator.collate(make_view(lengths, seed), training=True))
        collator.collate(make_view(lengths[::-1], seed + 1), training=True).release()
        assert_batches_equal(collator.collate(make_view(lengths, seed), training=True), first)

    @given(
        stored=st.lists(st.integers(1, 60), min_size=1, max_size=24),
        chosen=st.lists(st.integers(0, 23), max_size=24),
        layout=layout_strategy,
        seed=st.integers(0, 9),
        training=st.booleans(),
    )
    @fuzzing(60)
    def test_collator_equals_the_reference_bit_for_bit(
        self, stored: list[int], chosen: list[int], layout: ParallelLayout, seed: int, training: bool
    ) -> None:
        reference = self.make_reference(PAD, layout)
        if reference is None:
            pytest.skip("no reference to compare with")
        # Choose samples of the store in any order. A sample may be chosen more than once or not at all.
        indices = np.array([index % len(stored) for index in chosen], np.int64)
        samples = make_store(stored, seed).view(indices)
        batch = self.make_collator(PAD, layout).collate(samples, training=training)
        assert_batches_equal(batch, reference.collate(samples, training=training))


def clone(batch: TrainingBatch) -> TrainingBatch:
    """Return a copy that shares no buffer with the batch."""
    return batch.take(np.arange(batch.num_rows))


def assert_batches_equal(batch: TrainingBatch, expected: TrainingBatch) -> None:
    """Assert that all columns are equal, bit for bit, except that ids and positions may be int32 or int64."""
    assert batch.tokens.keys() == expected.tokens.keys()
    columns = {name: (batch.tokens[name], expected.tokens[name]) for name in batch.tokens}
    columns["unit_ids"] = (batch.unit_ids, expected.unit_ids)
    columns["is_padding_row"] = (batch.is_padding_row, expected.is_padding_row)
    for name, (got, wanted) in columns.items():
        if name in MAY_BE_WIDE:
            got, wanted = got.long(), wanted.long()
        assert got.dtype == wanted.dtype, (name, got.dtype, wanted.dtype)
        assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
        assert torch.equal(got, wanted), f"column {name} differs"
    assert batch.segments.keys() == expected.segments.keys()
    for name, column in batch.segments.items():
        assert column.values.tolist() == expected.segments[name].values.tolist(), name
        assert column.offsets.tolist() == expected.segments[name].offsets.tolist(), name
    for name, value in expected.info.items():
        assert math.isclose(batch.info[name], value, rel_tol=1e-9), name


def turns_in(batch: TrainingBatch) -> list[tuple[Any, ...]]:
    """Return (uid, sample, turn, tokens, loss weights) of each segment, with rewards if the batch has them."""
    found: list[tuple[Any, ...]] = []
    for row in range(batch.num_rows):
        names = zip(*(batch.segments[name][row].tolist() for name in ("uid", "sample", "turn")), strict=True)
        for segment, name in enumerate(names, start=1):
            where = batch.tokens["segment_ids"][row] == segment
            columns = ("input_ids", "loss_weights", "rewards")
            found.append((*name, *(batch.tokens[key][row][where].tolist() for key in columns if key in batch.tokens)))
    return found
