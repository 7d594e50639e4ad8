"""The fast collators equal core's reference bit for bit, and a buffer belongs to one batch at a time."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.data.collators.reference import PackedCollator, PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.errors import DataError
from spurline.protocols.collator import ParallelLayout
from spurline.testing import CollatorContract
from spurline.testing.collator_contract import assert_batches_equal, clone
from spurline.testing.samples import make_view
from spurline_collation_fast.collators import FastPackedCollator, FastPaddedCollator, FastRolloutsCollator
from spurline_collation_fast.lazy_ragged import LazyRagged
from spurline_collation_fast.row_writer import BufferPool, Lease
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.testing import RolloutCollatorContract
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import Group

PAD = 999


@pytest.fixture(autouse=True)
def _dirty_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column is dirty before a kernel writes it, as reused memory is."""
    acquire = BufferPool.acquire

    def dirty(pool: BufferPool, columns: Any) -> Lease:
        lease = acquire(pool, columns)
        for array in lease.arrays.values():
            array.fill(77)
        return lease

    monkeypatch.setattr(BufferPool, "acquire", dirty)


class Fast:
    """Subclass with `reference`, `fast` and `config`."""

    reference: Any
    fast: Any
    config: Any

    def make_collator(self, pad_token_id: int, layout: Any) -> Any:
        return self.fast(self.config, pad_token_id, layout)

    def make_reference(self, pad_token_id: int, layout: Any) -> Any:
        return self.reference(self.config, pad_token_id, layout)


class TestPaddedRight(Fast, CollatorContract):
    reference, fast, config = PaddedCollator, FastPaddedCollator, PaddedCollatorConfig()


class TestPaddedLeft(Fast, CollatorContract):
    reference, fast = PaddedCollator, FastPaddedCollator
    config = PaddedCollatorConfig(pad_side="left", pad_to_multiple_of=8)


class TestPacked(Fast, CollatorContract):
    reference, fast, config = PackedCollator, FastPackedCollator, PackedCollatorConfig(max_tokens=128)


class TestPackedAligned(Fast, CollatorContract):
    reference, fast = PackedCollator, FastPackedCollator
    config = PackedCollatorConfig(max_tokens=256, align_to=64, pad_to_max=True)


class TestRolloutsAsSamples(Fast, CollatorContract):
    reference, fast, config = RolloutsCollator, FastRolloutsCollator, RolloutsCollatorConfig()


class TestRolloutsRight(Fast, RolloutCollatorContract):
    reference, fast, config = RolloutsCollator, FastRolloutsCollator, RolloutsCollatorConfig()


class TestRolloutsLeft(Fast, RolloutCollatorContract):
    reference, fast = RolloutsCollator, FastRolloutsCollator
    config = RolloutsCollatorConfig(pad_side="left", pad_to_multiple_of=8)


class TestPackedEvenedOut(Fast, CollatorContract):
    reference, fast = PackedCollator, FastPackedCollator
    config = PackedCollatorConfig(max_tokens=192, align_to=4, algorithm="multifit")


def test_with_pipeline_stages_every_row_is_as_long_as_allowed() -> None:
    layout = ParallelLayout(data=2, pipeline=2)
    config = PackedCollatorConfig(max_tokens=96)
    batch = FastPackedCollator(config, PAD, layout).collate(make_view([5, 9]), training=True)
    assert batch.length == 96
    assert_batches_equal(batch, PackedCollator(config, PAD, layout).collate(make_view([5, 9]), training=True))


def test_what_cannot_fit_is_refused_in_the_words_of_the_reference() -> None:
    config, layout = PackedCollatorConfig(max_tokens=32, align_to=8), ParallelLayout()
    collators = PackedCollator(config, PAD, layout), FastPackedCollator(config, PAD, layout)
    messages: list[str] = []
    for collator in collators:
        with pytest.raises(DataError) as error:
            collator.collate(make_view([5, 33, 40]), training=True)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "after alignment" in messages[0]


def test_names_stay_readable_after_the_buffers_went_back() -> None:
    collator = FastPackedCollator(PackedCollatorConfig(max_tokens=32), PAD, ParallelLayout())
    batch = collator.collate(make_view([9, 8, 7]), training=True)
    taken, uids = batch.take([0]), ["random:0", "random:1", "random:2"]
    batch.release()
    collator.collate(make_view([30, 20]), training=True)
    assert sorted(batch.segments["uid"].values.tolist()) == sorted(taken.segments["uid"].values.tolist()) == uids


def test_a_lazy_column_computes_its_values_when_they_are_read() -> None:
    uids, made = make_view([3, 4, 5]), list[str]()
    batch = FastPaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout()).collate(uids, training=True)
    column = batch.segments["uid"]
    lazy = LazyRagged(lambda: made.append("made") or column.values, column.offsets).between(1, 3)
    assert not made
    assert [lazy[row].tolist() for row in range(2)] == [["random:1"], ["random:2"]]
    assert made == ["made"]


def test_an_unreleased_batch_is_never_overwritten_and_a_released_one_is_reused() -> None:
    collator = FastPaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout())
    held = [collator.collate(make_view([9, 8, 7], seed), training=True) for seed in range(6)]
    copies = [clone(batch) for batch in held]
    places = {batch.tokens["input_ids"].data_ptr() for batch in held}
    assert len(places) == 6
    for batch, copy in zip(held, copies, strict=True):
        assert_batches_equal(batch, copy)
    held[3].release()
    held[3].release()
    again = collator.collate(make_view([4, 4, 4]), training=True)
    other = collator.collate(make_view([4, 4, 4]), training=True)
    assert again.tokens["input_ids"].data_ptr() == held[3].tokens["input_ids"].data_ptr()
    assert other.tokens["input_ids"].data_ptr() not in places


@pytest.mark.parametrize("make", [FastPaddedCollator, FastRolloutsCollator])
def test_what_is_written_into_a_batch_does_not_reach_the_next_one(make: Any) -> None:
    config = PaddedCollatorConfig() if make is FastPaddedCollator else RolloutsCollatorConfig()
    collator = make(config, 0, ParallelLayout(data=2))

    def offsets() -> Any:
        if make is FastPaddedCollator:
            batch = collator.collate(make_view([3, 4, 5]), training=True)
        else:
            batch = collator.collate_rollouts([Group("p", 0, tuple(make_trajectories([[(3, 4)], [(1, 2)], [(2, 2)]])))])
        return batch.segments["length"].offsets

    first = offsets()
    before = first.copy()
    first[:] = -1
    assert np.array_equal(offsets(), before)


def acquire(pool: BufferPool, count: int = 10) -> Lease:
    return pool.acquire({"ids": ((count, 3), np.dtype(np.int64)), "weights": ((count, 3), np.dtype(np.float32))})


@given(script=st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=40))
@settings(max_examples=100)
def test_leases_in_use_never_share_memory(script: list[tuple[bool, int]]) -> None:
    pool = BufferPool(max_free=2)
    held: list[tuple[Lease, int]] = []
    for number, (give_back, count) in enumerate(script):
        if give_back and held:
            lease, _ = held.pop(count % len(held))
            lease.release()
            # Lends nothing twice.
            lease.release()
        else:
            lease = acquire(pool, count)
            assert {name: (array.shape, array.dtype) for name, array in lease.arrays.items()} == {
                "ids": ((count, 3), np.dtype(np.int64)),
                "weights": ((count, 3), np.dtype(np.float32)),
            }
            assert all(tensor.data_ptr() % 64 == 0 for tensor in lease.tensors.values())
            for array in lease.arrays.values():
                array.fill(number)
            held.append((lease, number))
        for lease, mark in held:
            assert all((array == mark).all() for array in lease.arrays.values())


def test_released_memory_is_used_again_also_by_a_slightly_larger_batch() -> None:
    pool = BufferPool()
    first = acquire(pool, 1000)
    place = first.tensors["ids"].data_ptr()
    first.release()
    assert acquire(pool, 1050).tensors["ids"].data_ptr() == place


def test_a_batch_that_is_never_released_is_freed_with_its_last_reference() -> None:
    lease = acquire(BufferPool())
    base = weakref.ref(lease.arrays["ids"].base)
    del lease
    gc.collect()
    assert base() is None


def test_no_more_memory_than_allowed_waits_for_use() -> None:
    pool = BufferPool(max_free=2)
    leases = [acquire(pool) for _ in range(5)]
    bases = [weakref.ref(lease.arrays["ids"].base) for lease in leases]
    for lease in leases:
        lease.release()
    del lease, leases
    gc.collect()
    assert sum(base() is not None for base in bases) == 2


def test_acquiring_and_releasing_on_two_threads_never_lends_one_buffer_twice() -> None:
    pool, handed, wrong = BufferPool(), threading.Semaphore(0), []
    queue: list[tuple[Lease, int]] = []

    def produce() -> None:
        for number in range(300):
            lease = acquire(pool)
            lease.arrays["ids"].fill(number)
            queue.append((lease, number))
            handed.release()

    thread = threading.Thread(target=produce)
    thread.start()
    for _ in range(300):
        assert handed.acquire(timeout=30), "the producer handed over nothing for 30 s"
        lease, number = queue.pop(0)
        if not (lease.arrays["ids"] == number).all():
            wrong.append(number)
        lease.release()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert wrong == []
