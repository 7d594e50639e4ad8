"""Reductions against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.batch import SEGMENT_COLUMNS, Ragged, TrainingBatch
from spurline.data.collators.reference import PackedCollator, PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.testing.samples import PAD, make_view
from spurline.update.reduction import Reduce, fixed_norm, prompt_mean, reduce_corrected, sequence_mean, token_mean

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


def one_batch(rows: list[list[tuple[str, int, int, list[float]]]]) -> TrainingBatch:
    """Rows of segments (uid, sample, turn, loss weights)."""
    length = max(sum(len(weights) for *_, weights in row) for row in rows)
    columns = {
        "input_ids": torch.ones(len(rows), length, dtype=torch.int64),
        "segment_ids": torch.zeros(len(rows), length, dtype=torch.int32),
        "position_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "loss_weights": torch.zeros(len(rows), length),
    }
    for row, segments in enumerate(rows):
        start = 0
        for number, (*_, weights) in enumerate(segments, start=1):
            where = slice(start, start + len(weights))
            columns["segment_ids"][row, where] = number
            columns["position_ids"][row, where] = torch.arange(len(weights))
            columns["loss_weights"][row, where] = torch.tensor(weights)
            start += len(weights)
    names = ("uid", "sample", "turn", "length")
    values = [[(uid, sample, turn, len(weights)) for uid, sample, turn, weights in row] for row in rows]
    return TrainingBatch(
        tokens=columns,
        segments={
            name: Ragged.from_rows([[segment[column] for segment in row] for row in values], SEGMENT_COLUMNS[name])
            for column, name in enumerate(names)
        },
        unit_ids=torch.arange(len(rows)),
        is_padding_row=torch.zeros(len(rows), dtype=torch.bool),
    )


segments_strategy = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.integers(0, 2),
            st.integers(0, 2),
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4).map(lambda weights: [0.0, *weights]),
        ),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=4,
)


@given(rows=segments_strategy, padding=st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_prompt_mean_weighs_every_prompt_with_loss_the_same(
    rows: list[list[tuple[str, int, int, list[float]]]], padding: int
) -> None:
    totals: dict[str, float] = {}
    for row in rows:
        for uid, *_, weights in row:
            totals[uid] = totals.get(uid, 0.0) + sum(weights)
    batch = one_batch(rows)
    reduced, normalizer = prompt_mean(batch.pad_rows(batch.num_rows + padding))
    assert normalizer == max(1, sum(total > 0 for total in totals.values()))
    for row, segments in enumerate(rows):
        expected = [w / totals[uid] if w else 0.0 for uid, *_, weights in segments for w in weights]
        got = reduced.tokens["loss_weights"][row]
        assert got[: len(expected)].tolist() == pytest.approx(expected, rel=1e-6)
        assert not bool(got[len(expected) :].any())
    assert not bool(reduced.tokens["loss_weights"][len(rows) :].any())


def test_fixed_norm_counts_trajectories_and_not_their_rows() -> None:
    separate = one_batch(
        [[("a", 0, 0, [0, 1])], [("a", 0, 1, [0, 1, 1])], [("a", 1, 0, [0, 1])], [("b", 0, 0, [0, 0])]]
    )
    merged = one_batch([[("a", 0, 1, [0, 1, 0, 1, 1])], [("a", 1, 0, [0, 1]), ("b", 0, 0, [0, 0])]])
    for batch in (separate, merged):
        reduced, normalizer = fixed_norm(100)(batch.pad_rows(5))
        assert normalizer == 300
        assert torch.equal(reduced.tokens["loss_weights"], batch.pad_rows(5).tokens["loss_weights"])


@pytest.mark.parametrize("reduce", [token_mean, sequence_mean, prompt_mean, fixed_norm(8)])
def test_a_batch_without_loss_has_no_weight_and_a_harmless_divisor(reduce: Reduce) -> None:
    reduced, normalizer = reduce(one_batch([[("a", 0, 0, [0, 0])]]))
    assert not bool(reduced.tokens["loss_weights"].any())
    assert normalizer > 0


def test_rejected_tokens_are_not_counted_and_other_factors_do_not_cancel_out() -> None:
    batch = one_batch([[("a", 0, 0, [0, 1, 1]), ("b", 0, 0, [0, 1, 1, 1])]])
    factors = torch.tensor([[1.0, 0.5, 0.5, 1.0, 0.0, 1.0, 2.0]])
    for reduce, weights, divisor in (
        (token_mean, [0, 0.5, 0.5, 0, 0, 1, 2], 4),
        (sequence_mean, [0, 0.25, 0.25, 0, 0, 0.5, 1], 2),
        (fixed_norm(10), [0, 0.5, 0.5, 0, 0, 1, 2], 20),
    ):
        reduced, normalizer = reduce_corrected(batch, factors, reduce)
        assert reduced.tokens["loss_weights"].tolist() == [weights]
        assert normalizer == divisor
