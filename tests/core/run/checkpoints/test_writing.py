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

from spurline.errors import CheckpointWriteError
from spurline.run.checkpoints.checkpoint import CheckpointStore, Written, open_checkpoint
from spurline.run.checkpoints.saving import Writing

PATIENCE_S = 60


class Write:
    """One write, which goes on when it is told to, and fails if `fails`."""

    def __init__(self, step: int, *, fails: bool) -> None:
        self.step, self.fails = step, fails
        self.go_on = threading.Event()

    def __call__(self, folder: Path) -> Written | None:
        (folder / "state").write_text(str(self.step))
        assert self.go_on.wait(PATIENCE_S)
        if self.fails:
            raise OSError(28, "No space left on device")
        (folder / "more").write_text("more")
        return None

    def begin(self, store: CheckpointStore, keep_last: int = 2) -> Writing:
        return Writing(store, self.step, self, {"config": {}, "versions": {}}, keep_last).write_beside()


class Writes(RuleBasedStateMachine):
    """What a run does with its writes, in any order, over a disk that fails now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = CheckpointStore(self.root / "checkpoints")
        self.under_way: tuple[Write, Writing] | None = None
        self.told: list[int] = []
        self.begun: list[Write] = []

    @precondition(lambda self: self.under_way is None)
    @rule(fails=st.booleans())
    def start(self, fails: bool) -> None:
        write = Write(len(self.begun) + 1, fails=fails)
        self.begun.append(write)
        self.under_way = write, write.begin(self.store)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def let_it_go_on(self) -> None:
        assert self.under_way is not None
        self.under_way[0].go_on.set()

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def take(self) -> None:
        assert self.under_way is not None
        write, writing = self.under_way
        assert writing.is_done(PATIENCE_S if write.go_on.is_set() else 0) == write.go_on.is_set()
        if not write.go_on.is_set():
            return
        self.under_way = None
        if write.fails:
            with pytest.raises(CheckpointWriteError):
                writing.result()
        else:
            assert open_checkpoint(writing.result()).step == writing.step == write.step
            self.told.append(write.step)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def abandon(self) -> None:
        assert self.under_way is not None
        (write, writing), self.under_way = self.under_way, None
        path = writing.abandon()
        if path is not None:
            assert open_checkpoint(path).step == write.step
            self.told.append(write.step)
        write.go_on.set()

    @invariant()
    def nothing_is_a_checkpoint_but_what_is_whole(self) -> None:
        found = [open_checkpoint(path).step for path in self.store.paths()]
        # One that is under way may have become one, and takes older ones away.
        assert set(found) - self.steps_under_way() <= set(self.told[-2:])
        assert set(self.told[-1:]) <= set(found)

    def steps_under_way(self) -> set[int]:
        return set() if self.under_way is None else {self.under_way[0].step}

    def teardown(self) -> None:
        for write in self.begun:
            write.go_on.set()
        for thread in threading.enumerate():
            if thread.name == "spurline-checkpoint":
                thread.join(PATIENCE_S)
        found = {open_checkpoint(path).step for path in self.store.paths()}
        assert found - self.steps_under_way() <= set(self.told[-2:])
        assert not [*self.store.root.glob(".*")], "a write left something behind"
        shutil.rmtree(self.root)


TestWrites = Writes.TestCase
TestWrites.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


def test_what_is_abandoned_never_becomes_a_checkpoint(tmp_path: Path) -> None:
    store, write = CheckpointStore(tmp_path / "checkpoints"), Write(3, fails=False)
    writing = write.begin(store)
    assert writing.abandon() is None
    write.go_on.set()
    assert writing.is_done(PATIENCE_S)
    assert list(store.root.iterdir()) == []
