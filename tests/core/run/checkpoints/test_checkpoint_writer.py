"""The thread that writes checkpoints: whatever fails and whenever it is asked, what it says is what is on the disk."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spurline.errors import CheckpointWriteError, RunDirectoryLostError
from spurline.run.checkpoints.checkpoint import CheckpointStore, Written, open_checkpoint
from spurline.run.checkpoints.checkpoint_writer import CheckpointWriter
from spurline.run.checkpoints.resume import CheckpointContents

PATIENCE_S = 60
FAILURES = ("none", "write", "lost")


class Write:
    """One write, which goes on when it is told to. failure: what goes wrong in it."""

    def __init__(self, step: int, failure: str) -> None:
        self.step, self.failure = step, failure
        self.go_on, self.ended = threading.Event(), threading.Event()

    def __call__(self, folder: Path) -> Written | None:
        try:
            (folder / "state").write_text(str(self.step))
            assert self.go_on.wait(PATIENCE_S)
            if self.failure == "write":
                raise OSError(28, "No space left on device")
            (folder / "more").write_text("more")
            return None
        finally:
            self.ended.set()

    def check_present(self) -> None:
        if self.failure == "lost":
            raise RunDirectoryLostError("lost")


class Writing(RuleBasedStateMachine):
    """What a run does with a writer, in any order, over a disk that fails now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = CheckpointStore(self.root / "checkpoints")
        self.writer = CheckpointWriter()
        self.step = 0
        self.under_way: Write | None = None
        self.told: list[int] = []
        self.begun: list[Write] = []

    @precondition(lambda self: self.under_way is None)
    @rule(failure=st.sampled_from(FAILURES))
    def start(self, failure: str) -> None:
        self.step += 1
        self.under_way = write = Write(self.step, failure)
        self.begun.append(write)
        contents = CheckpointContents(self.step, write, {"config": {}, "versions": {}}, None, keep_last=2)
        self.writer.start(contents, self.store, write.check_present)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def let_it_go_on(self) -> None:
        assert self.under_way is not None
        self.under_way.go_on.set()

    @rule(wait=st.booleans())
    def take(self, wait: bool) -> None:
        write = self.under_way
        if write is None:
            assert self.writer.taken(wait=wait) is None
            return
        may_end = write.go_on.is_set() or write.failure == "lost"
        if not may_end:
            assert self.writer.taken(wait=False) is None
            return
        found, failed = None, False
        try:
            found = self.writer.taken(wait=wait)
        except (CheckpointWriteError, RunDirectoryLostError):
            failed = True
        if failed:
            assert write.failure != "none"
            self.under_way = None
            return
        if found is None:
            assert not wait
            return
        step, path = found
        assert (step, write.failure == "none") == (write.step, True)
        assert open_checkpoint(path).step == step
        self.told.append(step)
        self.under_way = None

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def abandon(self) -> None:
        write, self.under_way = self.under_way, None
        assert write is not None
        found = self.writer.abandon()
        if found is not None:
            assert open_checkpoint(found[1]).step == write.step
            self.told.append(write.step)
        write.go_on.set()

    @invariant()
    def nothing_is_a_checkpoint_but_what_is_whole(self) -> None:
        found = [open_checkpoint(path).step for path in self.store.paths()]
        under_way = {self.under_way.step} if self.under_way is not None else set[int]()
        # One that is under way may have become one, and takes older ones away.
        assert set(found) - under_way <= set(self.told[-2:])
        assert set(self.told[-1:]) <= set(found)

    def teardown(self) -> None:
        for write in self.begun:
            write.go_on.set()
        for thread in threading.enumerate():
            if thread.name == "spurline-checkpoint":
                thread.join(PATIENCE_S)
        assert set(self.told[-2:]) >= {open_checkpoint(path).step for path in self.store.paths()} - (
            {self.under_way.step} if self.under_way is not None else set()
        )
        assert not [*self.store.root.glob(".*")], "a write left something behind"
        shutil.rmtree(self.root)


TestWriting = Writing.TestCase
TestWriting.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


def test_what_is_abandoned_never_becomes_a_checkpoint(tmp_path: Path) -> None:
    store, writer, write = CheckpointStore(tmp_path / "checkpoints"), CheckpointWriter(), Write(3, "none")
    contents = CheckpointContents(3, write, {"config": {}, "versions": {}}, None, keep_last=1)
    writer.start(contents, store, write.check_present)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "spurline-checkpoint")
    assert writer.abandon() is None
    write.go_on.set()
    thread.join(PATIENCE_S)
    assert list(store.root.iterdir()) == []
    assert writer.taken(wait=True) is None


def test_an_error_is_raised_once_and_the_next_checkpoint_is_written(tmp_path: Path) -> None:
    store, writer = CheckpointStore(tmp_path / "checkpoints"), CheckpointWriter()
    for step, failure in ((1, "write"), (2, "none")):
        write = Write(step, failure)
        write.go_on.set()
        contents = CheckpointContents(step, write, {"config": {}, "versions": {}}, None, keep_last=1)
        writer.start(contents, store, write.check_present)
        if failure == "write":
            with pytest.raises(CheckpointWriteError, match=r"step 1 cannot be written.*No space left"):
                writer.taken(wait=True)
            assert writer.taken(wait=True) is None
        else:
            assert writer.taken(wait=True) == (2, store.paths()[0])
