"""Data order: a pure function of (seed, epoch)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.order import DataOrder, permutation

sizes_strategy = st.lists(st.integers(1, 30), min_size=1, max_size=3)


@given(count=st.integers(0, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_permutation_is_a_permutation_and_repeats_itself(count: int, seed: int, epoch: int) -> None:
    first = permutation(count, seed, epoch)
    assert sorted(first.tolist()) == list(range(count))
    assert np.array_equal(first, permutation(count, seed, epoch))


def test_permutation_is_pinned_forever() -> None:
    # A change here silently reorders every run that is resumed after an upgrade.
    assert permutation(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(8, seed=1, epoch=2).tolist() == [7, 5, 4, 0, 3, 6, 1, 2]


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@given(sizes=sizes_strategy, seed=st.integers(0, 99), epochs=st.integers(1, 3), batch=st.integers(1, 17))
def test_batches_are_slices_of_the_endless_concatenation(sizes: list[int], seed: int, epochs: int, batch: int) -> None:
    order = DataOrder(sizes, [1.0] * len(sizes), seed)
    total = sum(sizes)
    whole = np.concatenate([order.positions(epoch * total, (epoch + 1) * total) for epoch in range(epochs + 1)])
    for step in range(1, epochs * total // batch + 1):
        assert np.array_equal(order.batch(step, batch), whole[(step - 1) * batch : step * batch])


@given(sizes=sizes_strategy, seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_each_epoch_has_every_sample_once(sizes: list[int], seed: int, epoch: int) -> None:
    order = DataOrder(sizes, [1.0] * len(sizes), seed)
    total = sum(sizes)
    assert sorted(order.positions(epoch * total, (epoch + 1) * total).tolist()) == list(range(total))


def test_asking_in_any_order_gives_the_same_batches() -> None:
    one, other = DataOrder([40], [1.0], 7), DataOrder([40], [1.0], 7)
    forward = [one.batch(step, 9).tolist() for step in range(1, 20)]
    backward = [other.batch(step, 9).tolist() for step in range(19, 0, -1)][::-1]
    assert forward == backward


def test_weight_two_shows_each_row_twice_per_epoch() -> None:
    order = DataOrder([5, 3], [2.0, 1.0], seed=0)
    counts = np.bincount(order.positions(0, order.samples_per_epoch), minlength=8)
    assert counts.tolist() == [2, 2, 2, 2, 2, 1, 1, 1]


def test_weight_one_half_shows_every_row_once_in_two_epochs() -> None:
    order = DataOrder([6, 4], [0.5, 1.0], seed=3)
    per_epoch = order.samples_per_epoch
    assert per_epoch == 7
    counts = np.bincount(order.positions(0, 2 * per_epoch), minlength=10)
    assert counts.tolist() == [1] * 6 + [2] * 4


def test_without_shuffle_the_order_is_the_file_order() -> None:
    order = DataOrder([3, 2], [1.0, 1.0], seed=0, shuffle=False)
    assert order.positions(0, 8).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
