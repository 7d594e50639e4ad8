"""The pool lends memory to one batch at a time."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline_collation_fast.row_writer import BufferPool, Lease


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
