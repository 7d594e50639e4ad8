"""Checkpoints that are written while training goes on: the same files, complete or absent, whatever ends the run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_helpers import deterministic, read_metrics, wait_for

from spurline import Run, load_config
from spurline.digests import digest_file
from spurline.errors import CheckpointWriteError, ConfigError, HookFailedError, RunDirectoryLostError
from spurline.plugins.hookspecs import hookimpl
from spurline.protocols.stateful import StateParts
from spurline.run.checkpoints import checkpoint, checkpoint_writer
from spurline.run.checkpoints.checkpoint import CheckpointStore, Prepared, open_checkpoint

PATIENCE_S = 60


class Gate:
    """Holds back every write beside training until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self.passed = threading.Event()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
    made = Gate()
    made.install(monkeypatch)
    yield made
    made.open()


@pytest.fixture
def beside(base_config: dict[str, Any]) -> dict[str, Any]:
    """Steps 2 and 4 are written beside training, and step 6, the last one, at once."""
    base_config["model"]["config_overrides"] = {"attention_dropout": 0.1}
    base_config["checkpoint"] = {"every_steps": 2, "keep_last": 9, "async": True}
    base_config["report"] = {"enabled": False}
    return base_config


class Watcher:
    """Keeps state that it changes in place, and notes what it sees. at: what to do at the begin of a step."""

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


def train(config: dict[str, Any], watcher: Watcher | None = None) -> Any:
    loaded = load_config(config)
    loaded.host.attach(watcher or Watcher(), "watcher")
    return Run(loaded).train()


def contents(run_dir: Path | str, step: int) -> dict[str, bytes]:
    """Every file of a checkpoint but the manifest, which has the run's own settings."""
    folder = Path(run_dir) / "checkpoints" / f"step-{step:08d}"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def steps_kept(run_dir: Path | str) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in CheckpointStore(Path(run_dir) / "checkpoints").paths()]


def test_what_is_written_later_is_what_was_there_at_the_step(
    beside: dict[str, Any], gate: Gate, tmp_path: Path
) -> None:
    # Opened after step 3 has changed all that step 2 is to save.
    watcher = Watcher({4: gate.open})
    train(beside, watcher)
    at_once = beside | {"run_dir": str(tmp_path / "at-once"), "checkpoint": {**beside["checkpoint"], "async": False}}
    train(at_once)
    assert steps_kept(beside["run_dir"]) == steps_kept(at_once["run_dir"]) == [2, 4, 6]
    for step in (2, 4, 6):
        assert contents(beside["run_dir"], step) == contents(at_once["run_dir"], step)
    lines = read_metrics(beside["run_dir"])
    assert deterministic(lines) == deterministic(read_metrics(at_once["run_dir"]))
    # What is not finished is not told; hooks hear of it on the loop's thread, once a step has ended.
    assert watcher.seen[:4] == [0, 0, 0, 0]
    assert [(step, on_loop) for step, _, on_loop in watcher.saved] == [(2, True), (4, True), (6, True)]
    assert watcher.saved[0][1] in (4, 5)
    # Of a copy the line of the next step tells.
    assert [line["step"] for line in lines if "time/checkpoint_copy" in line] == [3, 5]


def test_no_file_of_a_checkpoint_is_read_back(beside: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def note(path: Path, *, sync: bool = False) -> Any:
        read.append(path)
        return digest_file(path, sync=sync)

    watcher = Watcher({5: lambda: monkeypatch.setattr(checkpoint, "digest_file", note)})
    # Step 6 is saved at once, and verified by the hook.
    monkeypatch.setattr(watcher, "on_checkpoint_saved", lambda step, path: None)
    train(beside | {"steps": 6, "checkpoint": {"every_steps": 2, "async": False}}, watcher)
    assert read == []
    found = open_checkpoint(CheckpointStore(Path(beside["run_dir"]) / "checkpoints").paths()[-1])
    assert len(read) == len(found.manifest["files"]) > 5


def test_a_run_that_fails_while_a_checkpoint_is_written_keeps_it(beside: dict[str, Any], gate: Gate) -> None:
    def fail() -> None:
        gate.open()
        raise ZeroDivisionError

    watcher = Watcher({4: fail})
    with pytest.raises(HookFailedError):
        train(beside, watcher)
    assert steps_kept(beside["run_dir"]) == [2]
    assert watcher.run.state.saved_step == 2
    train(beside)
    assert [line["step"] for line in read_metrics(beside["run_dir"])] == [1, 2, 3, 4, 5, 6]


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
    monkeypatch.setattr(checkpoint_writer, "WAIT_LIMIT_S", 0.1)
    with pytest.raises(CheckpointWriteError, match=r"step 2 is still being written to .*checkpoints after"):
        train(beside)
    gate.open()
    assert gate.passed.wait(PATIENCE_S)
    assert steps_kept(beside["run_dir"]) == []


def test_a_run_directory_that_disappears_while_it_is_written_to_is_noticed(
    beside: dict[str, Any], gate: Gate, tmp_path: Path
) -> None:
    def lose() -> None:
        shutil.rmtree(beside["run_dir"])
        gate.open()

    with pytest.raises(RunDirectoryLostError, match=r"run_dir .* was removed or moved") as raised:
        train(beside, Watcher({4: lose}))
    assert not hasattr(raised.value, "__notes__")
    # No other folder was made in its place.
    assert not (tmp_path / "run").exists()


def test_a_backend_that_cannot_be_saved_while_it_trains_is_refused(beside: dict[str, Any]) -> None:
    beside |= {"plugins": ["fsdp_backend"], "backend": {"name": "fsdp", "device": "cpu"}}
    with pytest.raises(ConfigError, match=r"checkpoint\.async is not supported by backend 'fsdp'.*local"):
        load_config(beside)
