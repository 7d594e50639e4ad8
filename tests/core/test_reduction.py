"""Reductions against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.builtin.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.builtin.packed_collator import PackedCollator
from spurline.builtin.padded_collator import PaddedCollator
from spurline.data.batch import TrainingBatch
from spurline.protocols.collator import ParallelLayout
from spurline.reduction import sequence_mean, token_mean
from spurline.testing.data import PAD, make_view

lengths_strategy = st.lists(st.integers(1, 12), min_size=1, max_size=10)


def batches(lengths: list[int], seed: int) -> list[TrainingBatch]:
    samples, layout = make_view(lengths, seed), ParallelLayout()
    return [
        PaddedCollator(PaddedCollatorConfig(), PAD, layout).collate(samples, training=True),
        PackedCollator(PackedCollatorConfig(max_tokens=30), PAD, layout).collate(samples, training=True),
    ]


def weight_of_each_segment(batch: TrainingBatch) -> dict[str, float]:
    found = {}
    for row in range(batch.num_rows):
        for number, uid in enumerate(batch.segments["uid"][row], start=1):
            found[uid] = float(batch.tokens["loss_weights"][row][batch.tokens["segment_ids"][row] == number].sum())
    return found


@given(lengths=lengths_strategy, seed=st.integers(0, 50))
@settings(deadline=None, max_examples=40)
def test_token_mean_weighs_every_loss_token_the_same(lengths: list[int], seed: int) -> None:
    for batch in batches(lengths, seed):
        reduced, normalizer = token_mean(batch)
        assert torch.equal(reduced.tokens["loss_weights"], batch.tokens["loss_weights"])
        assert normalizer == max(1, batch.num_loss_tokens)


@given(lengths=lengths_strategy, seed=st.integers(0, 50))
@settings(deadline=None, max_examples=40)
def test_sequence_mean_weighs_every_sample_with_loss_the_same(lengths: list[int], seed: int) -> None:
    for batch in batches(lengths, seed):
        before = weight_of_each_segment(batch)
        reduced, normalizer = sequence_mean(batch)
        after = weight_of_each_segment(reduced)
        assert normalizer == max(1, sum(weight > 0 for weight in before.values()))
        for uid, weight in before.items():
            assert after[uid] == pytest.approx(1.0 if weight > 0 else 0.0, abs=1e-6)
        zero = batch.tokens["loss_weights"] == 0
        assert bool((reduced.tokens["loss_weights"][zero] == 0).all())


def test_one_sample_may_not_outweigh_another_by_length() -> None:
    batch, normalizer = sequence_mean(batches([12, 9], seed=1)[1])
    assert normalizer == 2
    assert list(weight_of_each_segment(batch).values()) == pytest.approx([1.0, 1.0])
