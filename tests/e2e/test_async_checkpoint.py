"""Checkpoints that are written while training goes on: the same files, complete or absent, whatever ends the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_helpers import Config, Trained, kept_steps, train, wait_for

from spurline import Run, load_config
from spurline.errors import CheckpointWriteError, ConfigError, HookFailedError
from spurline.plugins.hookspecs import hookimpl
from spurline.protocols.stateful import StateParts
from spurline.run.checkpoints import saving
from spurline.run.checkpoints.checkpoint import CheckpointStore, Prepared, open_checkpoint

PATIENCE_S = 60


class Gate:
    """Holds back every write beside training until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self.passed = threading.Event()
        prepare = CheckpointStore.prepare

        def held(store: CheckpointStore, *arguments: Any) -> Prepared:
            if threading.current_thread() is threading.main_thread():
                return prepare(store, *arguments)
            self.reached.set()
            assert self._open.wait(PATIENCE_S)
            try:
                return prepare(store, *arguments)
            finally:
                self.passed.set()

        monkeypatch.setattr(CheckpointStore, "prepare", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


@pytest.fixture
def beside(base_config: Config) -> Config:
    """Steps 2 and 4 are written beside training, and step 6, the last one, at once."""
    base_config["model"]["config_overrides"] = {"attention_dropout": 0.1}
    base_config["checkpoint"] = {"every_steps": 2, "keep_last": 9, "async": True}
    base_config["report"] = {"enabled": False}
    return base_config


class Watcher:
    """Keeps state that it changes in place, and notes what it sees. at: functions to call when a step begins."""

    def __init__(self, at: Mapping[int, Any] | None = None) -> None:
        self._at = at or {}
        self.saved: list[tuple[int, int, bool]] = []
        self.seen: list[int] = []
        self.array, self.parts = np.zeros(3), [np.zeros(2)]
        self.nested: dict[str, Any] = {"list": [0]}

    def state_dict(self) -> dict[str, object]:
        parts = StateParts(lambda: ({"values": values} for values in self.parts))
        return {"array": self.array, "parts": parts, "nested": self.nested}

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self.run = run
        run.keep_state("watcher", self)  # type: ignore[arg-type]

    @hookimpl
    def on_step_start(self, step: int) -> None:
        self.seen.append(self.run.state.saved_step)
        self.array += 1
        self.parts[0] += 1
        self.nested["list"][0] += 1
        if step in self._at:
            self._at[step]()

    @hookimpl
    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        open_checkpoint(path)
        assert self.run.state.checkpoint == path
        self.saved.append((step, self.run.state.step, threading.current_thread() is threading.main_thread()))


def contents(run: Trained, step: int) -> dict[str, bytes]:
    """Return the files of a checkpoint, except the manifest, which names settings of the run."""
    folder = run.run_dir / "checkpoints" / f"step-{step:08d}"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def test_what_is_written_later_is_what_was_there_at_the_step(beside: Config, gate: Gate) -> None:
    # Opened after step 3 has changed all that step 2 is to save.
    watcher = Watcher({4: gate.open})
    run = train(beside, watcher)
    at_once = train(beside, Watcher(), name="at-once", checkpoint={**beside["checkpoint"], "async": False})
    assert kept_steps(run) == kept_steps(at_once) == [2, 4, 6]
    for step in (2, 4, 6):
        assert contents(run, step) == contents(at_once, step)
    assert run.without_times == at_once.without_times
    # Hooks hear of a checkpoint once it is complete, on the thread of the loop, when a step has ended.
    assert watcher.seen[:4] == [0, 0, 0, 0]
    assert [(step, on_loop) for step, _, on_loop in watcher.saved] == [(2, True), (4, True), (6, True)]
    assert watcher.saved[0][1] in (4, 5)
    # The line of the next step tells how long a copy took.
    assert [line["step"] for line in run.lines if "time/checkpoint_copy" in line] == [3, 5]


def test_a_run_that_fails_while_a_checkpoint_is_written_keeps_it(beside: dict[str, Any], gate: Gate) -> None:
    def fail() -> None:
        gate.open()
        raise ZeroDivisionError

    watcher = Watcher({4: fail})
    with pytest.raises(HookFailedError):
        train(beside, watcher)
    assert kept_steps(beside["run_dir"]) == [2]
    assert watcher.run.state.saved_step == 2
    assert train(beside, Watcher()).steps == [1, 2, 3, 4, 5, 6]


def test_a_second_signal_leaves_nothing_that_could_become_a_checkpoint_later(
    beside: dict[str, Any], gate: Gate
) -> None:
    def interrupt() -> None:
        assert gate.reached.wait(PATIENCE_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="There is no checkpoint"):
        train(beside, Watcher({4: interrupt}))
    gate.open()
    assert gate.passed.wait(PATIENCE_S)
    folder = Path(beside["run_dir"]) / "checkpoints"
    wait_for(lambda: not any(folder.iterdir()), "the folder to be empty again")


def test_a_write_that_hangs_ends_the_run_with_what_it_waited_for(
    beside: dict[str, Any], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "WAIT_LIMIT_S", 0.1)
    with pytest.raises(CheckpointWriteError, match=r"step 2 is still being written to .*checkpoints after"):
        train(beside, Watcher())
    gate.open()
    assert gate.passed.wait(PATIENCE_S)
    assert kept_steps(beside["run_dir"]) == []


def test_a_backend_that_cannot_be_saved_while_it_trains_is_refused(beside: dict[str, Any]) -> None:
    beside |= {"plugins": ["fsdp_backend"], "backend": {"name": "fsdp", "device": "cpu"}}
    with pytest.raises(ConfigError, match=r"checkpoint\.async is not supported by backend 'fsdp'.*local"):
        load_config(beside)
