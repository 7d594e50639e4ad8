"""Slice workers: samples in order, errors as in one process, and nothing left behind however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_helpers import wait_for
from worker_rows import TrappedRows, chat_rows, data_config, is_alive, source

from spurline.errors import DataError, RunFailedError
from spurline_collation_fast.tokenization.chunks import RowLine, even_slices
from spurline_collation_fast.tokenization.slice_worker import SliceTask, UnsharableDataError
from spurline_collation_fast.tokenization.slice_workers import SliceWorkers
from spurline_text import own_folder
from spurline_text.own_folder import OwnFolder
from spurline_text.testing.inputs import tiny_tokenizer

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_children")]


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files of workers go here; none may be left, and no thread that reads their pipes."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    # Processes that earlier tests keep for later ones have such threads too.
    before = set(threading.enumerate())
    yield
    assert list(place.iterdir()) == []
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("child-")]


def workers_on(dataset: Any, num_workers: int, stall_timeout_s: float = 60, **settings: Any) -> SliceWorkers:
    item = source(dataset, **settings)
    task = SliceTask([item], tiny_tokenizer(), data_config(item))
    line = RowLine([len(dataset)])
    return SliceWorkers(task, line, range(len(dataset)), num_workers, stall_timeout_s, lambda rows: None)


def run(workers: SliceWorkers, ids: list[int]) -> list[int]:
    """Rows in the order in which they come; `ids` gets the workers' process ids."""
    with workers:
        ids += workers.process_ids
        return [row for block in workers.blocks() for row in block.rows.tolist()]


def test_slices_are_even_and_leave_no_row_out() -> None:
    for rows in (range(7), range(100, 1101), range(64)):
        for number in (1, 2, 3, 7):
            slices = even_slices(rows, number)
            assert [row for cut in slices for row in cut] == list(rows)
            assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_the_first_bad_row_is_the_error_even_when_a_later_slice_finds_another_first() -> None:
    rows = TrappedRows(chat_rows(300), {0: "slow", 99: "is the first", 200: "is another"})
    ids: list[int] = []
    with pytest.raises(DataError, match=r"^rows\.jsonl:100: is the first$"):
        run(workers_on(rows, 3), ids)
    assert len(ids) == 3
    assert not any(map(is_alive, ids))


def test_a_killed_worker_is_named_with_its_rows_and_a_way_out() -> None:
    ids: list[int] = []
    with pytest.raises(
        RunFailedError, match=r"(?s)worker 2 of 2 .*row 100 to row 199.*SIGKILL.*memory.*fewer"
    ) as failure:
        run(workers_on(TrappedRows(chat_rows(200), {0: "hang", 150: "kill"}), 2), ids)
    assert str(ids[1]) in str(failure.value)
    assert not any(map(is_alive, ids))


def test_a_worker_that_exits_is_reported_with_what_it_said() -> None:
    with pytest.raises(RunFailedError, match=r"(?s)worker 1 of 1 .*exit code 3.*the disk is on fire"):
        run(workers_on(TrappedRows(chat_rows(4), {2: "exit"}), 1), [])


def test_workers_that_stand_still_are_named_and_ended() -> None:
    ids: list[int] = []
    with pytest.raises(
        RunFailedError, match=r"(?s)for 5 s.*worker 1 of 1 .*row 0 to row 199\): \d+ rows done.*stall_timeout_s"
    ):
        run(workers_on(TrappedRows(chat_rows(200), {150: "hang"}), 1, stall_timeout_s=5), ids)
    assert not any(map(is_alive, ids))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_of_the_caller_ends_the_workers(error: type[BaseException]) -> None:
    ids: list[int] = []

    def leave() -> None:
        with workers_on(TrappedRows(chat_rows(20), {10: "hang"}), 2) as workers:
            ids.extend(workers.process_ids)
            assert all(map(is_alive, ids))
            raise error

    with pytest.raises(error):
        leave()
    assert not any(map(is_alive, ids))


def test_killing_the_parent_ends_its_workers_and_removes_their_files(tmp_path: Path) -> None:
    place = tmp_path / "orphans"
    place.mkdir()
    environment = {"TMPDIR": str(place), "PYTHONPATH": ":".join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", "import worker_rows; worker_rows.start_and_wait()"],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        ids = [int(word) for word in parent.stdout.readline().split()]
    assert len(ids) == 2
    assert all(map(is_alive, ids))
    parent.kill()
    parent.wait(10)
    wait_for(lambda: not any(map(is_alive, ids)), "the end of the workers")
    assert list(place.iterdir()) == []


def test_data_of_a_module_that_a_worker_cannot_import_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_in_this_process")
    module.__dict__["Rows"] = type("Rows", (TrappedRows,), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(UnsharableDataError, match="only_in_this_process"):
        run(workers_on(module.__dict__["Rows"](chat_rows(4)), 1), [])


def test_data_that_cannot_be_pickled_is_found_out_before_a_worker_starts() -> None:
    rows = TrappedRows(chat_rows(4))
    rows.open = lambda: None  # type: ignore[attr-defined]
    workers = workers_on(rows, 1)
    with pytest.raises(UnsharableDataError, match="lambda"):
        run(workers, [])
    assert workers.process_ids == []


def test_the_files_of_a_whole_tree_that_was_killed_go_with_the_next_start() -> None:
    place = Path(tempfile.gettempdir())
    owner = OwnFolder("spurline-tokenize-")
    (owner.path / "slice-0").write_bytes(b"tokens")
    # A process that is gone: its lock went with it.
    os.close(owner._lock)
    elsewhere = place.parent / "elsewhere"
    elsewhere.mkdir()
    link = place / "spurline-tokenize-link"
    link.symlink_to(elsewhere)
    next_one = OwnFolder("spurline-tokenize-")
    assert sorted(place.iterdir()) == sorted([link, next_one.path])
    assert elsewhere.is_dir()
    link.unlink()
    next_one.remove()


def test_the_files_of_a_living_owner_stay() -> None:
    mine, others = OwnFolder("spurline-tokenize-"), OwnFolder("spurline-tokenize-")
    assert mine.path.is_dir()
    mine.remove()
    others.remove()


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def flock(file: int, operation: int) -> None:
        made.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        if len(made) == 1:
            made[0].rmdir()

    monkeypatch.setattr(own_folder.fcntl, "flock", flock)
    owner = OwnFolder("spurline-tokenize-")
    assert owner.path == made[-1] != made[0]
    owner.remove()
