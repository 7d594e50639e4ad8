"""A pool of workers: samples in order, errors as in one process, and nothing left behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_helpers import wait_for
from worker_rows import TrappedRows, chat_rows, data_config, is_alive, large_block, source

from spurline.errors import DataError, RunFailedError
from spurline_collation_fast.tokenization import blocks
from spurline_collation_fast.tokenization.blocks import BlockEncoder, Chunk, UnsharableDataError, WorkerPool, chunks_of
from spurline_text.testing.inputs import tiny_tokenizer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_workers")]


def pool_on(dataset: Any, num_workers: int = 2) -> WorkerPool:
    item = source(dataset)
    return WorkerPool(BlockEncoder([item], tiny_tokenizer(), data_config(item)), num_workers)


def chunks(num_rows: int) -> Iterator[Chunk]:
    return chunks_of([num_rows], 0, lambda: 20)


def rows_of(pool: WorkerPool, num_rows: int) -> list[int]:
    """Rows in the order in which they come."""
    with pool:
        return [row for block in pool.blocks(chunks(num_rows)) for row in block.rows.tolist()]


def assert_ended(pool: WorkerPool) -> None:
    assert len(pool.process_ids) == 2
    assert not any(map(is_alive, pool.process_ids))


def test_blocks_come_in_order_and_the_workers_end() -> None:
    pool = pool_on(TrappedRows(chat_rows(300), {0: "slow"}))
    assert rows_of(pool, 300) == list(range(300))
    assert_ended(pool)


def test_the_first_bad_row_is_the_error_even_when_a_later_chunk_finds_another_first() -> None:
    pool = pool_on(TrappedRows(chat_rows(60), {0: "slow", 19: "is the first", 20: "is another"}))
    with pytest.raises(DataError, match=r"^rows\.jsonl:20: is the first$"):
        rows_of(pool, 60)
    assert_ended(pool)


def test_a_killed_worker_is_an_error_with_a_way_out() -> None:
    pool = pool_on(TrappedRows(chat_rows(60), {30: "kill"}))
    with pytest.raises(RunFailedError, match=r"memory ran out.*tokenization\.workers"):
        rows_of(pool, 60)
    assert_ended(pool)


def test_workers_that_stand_still_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_on(TrappedRows(chat_rows(60), {30: "hang"}))
    with pool:
        rest = pool.blocks(chunks(60))
        next(rest)
        assert all(map(is_alive, pool.process_ids))
        later = count(0, 0.6 * blocks._STALL_TIMEOUT_S).__next__
        monkeypatch.setattr(blocks, "time", SimpleNamespace(monotonic=later))
        with pytest.raises(RunFailedError, match=r"within 1800 s.*tokenization\.workers"):
            next(rest)
    assert_ended(pool)


def test_an_exception_of_the_caller_ends_the_workers() -> None:
    pool = pool_on(TrappedRows(chat_rows(60), {30: "hang"}))

    def leave() -> None:
        with pool:
            next(pool.blocks(chunks(60)))
            assert all(map(is_alive, pool.process_ids))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert_ended(pool)


def on_first_part(pool: WorkerPool, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act when a part of a block is in the pipe. The rest is not taken before a worker is dead."""
    monkeypatch.setattr(blocks, "_encode", large_block)
    executor: Any = pool._executor
    reader = executor._result_queue._reader
    receive = reader.recv

    def receive_late() -> Any:
        act()
        connection.wait([process.sentinel for process in executor._processes.values()])
        return receive()

    monkeypatch.setattr(reader, "recv", receive_late)


@pytest.mark.timeout(120)
def test_leaving_ends_workers_that_are_in_the_middle_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_on(TrappedRows(chat_rows(60)))
    has_begun = threading.Event()
    with pool:
        on_first_part(pool, has_begun.set, monkeypatch)
        for chunk in chunks(60):
            pool._submit(chunk)
        assert has_begun.wait(60)
    assert_ended(pool)


@pytest.mark.timeout(120)
def test_a_worker_killed_in_the_middle_of_a_block_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_on(TrappedRows(chat_rows(60)), num_workers=1)
    with pool:
        on_first_part(pool, lambda: os.kill(pool.process_ids[0], signal.SIGKILL), monkeypatch)
        with pytest.raises(RunFailedError, match=r"memory ran out.*tokenization\.workers"):
            list(pool.blocks(chunks(60)))
    assert not is_alive(pool.process_ids[0])


def test_a_script_without_a_main_guard_is_not_run_again_in_its_workers_which_end_when_it_is_killed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from worker_rows import *\n"
        "from spurline_collation_fast.tokenization.blocks import BlockEncoder, WorkerPool, chunks_of\n"
        "from spurline_text.testing.inputs import tiny_tokenizer\n"
        "item = source(TrappedRows(chat_rows(40), {29: 'hang', 39: 'hang'}))\n"
        "with WorkerPool(BlockEncoder([item], tiny_tokenizer(), data_config(item)), 2) as pool:\n"
        # The executor starts no process for a chunk while it counts an idle one: the last worker comes later then.
        "    pool._executor._idle_worker_semaphore.release()\n"
        "    blocks = pool.blocks(chunks_of([40], 0, lambda: 10))\n"
        "    print(next(blocks).num_rows + next(blocks).num_rows, *pool.process_ids, flush=True)\n"
        "    time.sleep(120)\n"
    )
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        rows, *ids = map(int, parent.stdout.readline().split())
    assert (rows, len(ids)) == (20, 2)
    parent.kill()
    parent.wait(10)
    wait_for(lambda: not any(map(is_alive, ids)), "the end of the workers")


def test_data_of_a_module_that_a_worker_cannot_import_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_in_this_process")
    module.__dict__["Rows"] = type("Rows", (TrappedRows,), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(UnsharableDataError, match="only_in_this_process"):
        rows_of(pool_on(module.__dict__["Rows"](chat_rows(60))), 60)


def test_data_that_cannot_be_pickled_is_found_out_before_a_worker_starts() -> None:
    rows = TrappedRows(chat_rows(4))
    rows.open = lambda: None  # type: ignore[attr-defined]
    pool = pool_on(rows)
    with pytest.raises(UnsharableDataError, match="lambda"):
        rows_of(pool, 4)
    assert pool.process_ids == []
