"""Checkpoints: complete or absent, verified before use."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spurline.digests import FileDigest, digest_file, verify_files
from spurline.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError
from spurline.run.checkpoints.checkpoint import MANIFEST, CheckpointStore, Written, open_checkpoint
from spurline.run.checkpoints.state_files import read_state

FACTS = {"config": {"seed": 0}, "versions": {"spurline": "0"}}


def write_state(folder: Path) -> None:
    (folder / "backend").mkdir()
    (folder / "backend" / "model.bin").write_bytes(b"weights" * 100)
    (folder / "run.json").write_text("{}")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_the_option_that_is_offered_is_one_of_the_command(store: CheckpointStore) -> None:
    store.save(5, write_state, FACTS)
    (store.save(6, write_state, FACTS) / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"use `--resume .*5`"):
        store.latest()
    # Of `spurline export` and `spurline generate`.
    with pytest.raises(CheckpointError, match=r"use `--checkpoint .*5`"):
        store.chosen("latest")


def test_a_truncated_file_is_named_with_both_sizes(store: CheckpointStore) -> None:
    path = store.save(5, write_state, FACTS)
    (path / "backend" / "model.bin").write_bytes(b"wei")
    with pytest.raises(CheckpointError, match=r"model\.bin is damaged: it has 3 bytes.*no other good checkpoint"):
        store.latest()


def write_hashed(folder: Path) -> Written:
    """As a backend does that hashes what it writes, and verifies what it reads."""
    write_state(folder)
    digests = {"backend/model.bin": digest_file(folder / "backend" / "model.bin", sync=True)}
    return Written(digests, digests.keys())


def test_a_file_that_its_reader_verifies_is_left_to_it(store: CheckpointStore) -> None:
    path = store.save(5, write_hashed, FACTS)
    weights = path / "backend" / "model.bin"
    flip(weights, 350)
    opened = open_checkpoint(path)
    unverified = opened.unverified("backend")
    assert list(unverified) == ["model.bin"]
    with pytest.raises(DamagedCheckpointError, match=r"model\.bin is damaged: its content has changed"):
        verify_files(path / "backend", unverified)
    flip(weights, 350)
    verify_files(path / "backend", unverified)
    flip(path / "run.json", 1)
    with pytest.raises(CheckpointError, match=r"run\.json is damaged: its content has changed"):
        open_checkpoint(path)
    weights.write_bytes(b"wei")
    with pytest.raises(CheckpointError, match=r"model\.bin is damaged: it has 3 bytes"):
        open_checkpoint(path)


def test_the_checkpoint_that_is_offered_is_whole_in_every_file(store: CheckpointStore) -> None:
    paths = [store.save(step, write_hashed, FACTS) for step in (5, 10, 15)]
    flip(paths[1] / "backend" / "model.bin", 350)
    (paths[2] / "run.json").unlink()
    with pytest.raises(CheckpointError, match=f"run.json is missing.*step 5.*--resume {paths[0]}"):
        store.latest()


def test_digests_of_files_that_are_not_there_are_no_checkpoint(store: CheckpointStore) -> None:
    def elsewhere(folder: Path) -> Written:
        written = write_hashed(folder).digests
        return Written({**written, "backend/rank-00001.safetensors": FileDigest(700, "0" * 32)})

    with pytest.raises(CheckpointWriteError, match=r"rank-00001\.safetensors.*storage that all machines share"):
        store.save(5, elsewhere, FACTS)

    def shorter(folder: Path) -> Written:
        written = write_hashed(folder).digests
        return Written({name: FileDigest(digest.num_bytes + 1, digest.xxh3) for name, digest in written.items()})

    with pytest.raises(CheckpointWriteError, match=r"model\.bin has 700 bytes, and its writer says .* 701"):
        store.save(5, shorter, FACTS)
    assert store.paths() == []


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_every_truncation_of_the_manifest_is_refused(store: CheckpointStore) -> None:
    path = store.save(5, write_state, FACTS)
    whole = (path / MANIFEST).read_text()
    for length in range(len(whole.rstrip()) - 1):
        (path / MANIFEST).write_text(whole[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json is not valid JSON"):
            open_checkpoint(path)


def test_foreign_folders_and_other_versions_are_refused(store: CheckpointStore, tmp_path: Path) -> None:
    path = store.save(5, write_state, FACTS)
    with pytest.raises(CheckpointError, match="not a Spurline checkpoint"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a checkpoint folder"):
        open_checkpoint(tmp_path / "nowhere")
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(CheckpointError, match="layout version 99; this spurline reads version 2"):
        open_checkpoint(path)
    (path / MANIFEST).write_text(json.dumps({"format": "something else"}))
    with pytest.raises(CheckpointError, match="another format"):
        open_checkpoint(path)


def test_a_full_disk_leaves_earlier_checkpoints_and_no_rubbish(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or real(path))

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointWriteError, match=r"No space left.*There is no earlier checkpoint"):
        store.save(5, fail, FACTS)
    store.save(5, write_state, FACTS)
    with pytest.raises(CheckpointWriteError, match=r"step 10 cannot be written.*No space left.*Kept: step-00000005"):
        store.save(10, fail, FACTS)
    assert asked == [store.root, store.root], "checkpoints may be on another disk than the rest of the run directory"
    assert sorted(entry.name for entry in store.root.iterdir()) == ["latest", "step-00000005"]
    latest = store.latest()
    assert latest is not None
    assert latest.step == 5


def test_a_checkpoint_newer_than_the_pointer_is_used(store: CheckpointStore) -> None:
    # A kill between renaming the folder and renaming `latest` leaves this.
    store.save(5, write_state, FACTS)
    pointer = (store.root / "latest").read_text()
    store.save(10, write_state, FACTS)
    (store.root / "latest").write_text(pointer)
    latest = store.latest()
    assert latest is not None
    assert latest.step == 10


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(5, write_state, FACTS)
    store.save(5, write_state, {**FACTS, "config": {"seed": 1}})
    latest = store.latest()
    assert latest is not None
    assert latest.config == {"seed": 1}


WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from spurline.protocols.stateful import StateParts
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.checkpoints.state_files import write_state
def write(folder):
    (folder / "backend").mkdir()
    for part in range(20):
        (folder / "backend" / f"{part}.bin").write_bytes(bytes([part]) * 50_000)
    parts = StateParts(lambda: ({"tokens": np.full(9, number)} for number in range(5)))
    write_state(folder / "components" / "source" / "any", {"groups": parts})
store = CheckpointStore(Path(sys.argv[1]))
for line in sys.stdin:
    if writer := os.fork():
        print("ended", os.waitpid(writer, 0)[1], flush=True)
        continue
    for step in range(1, 10_000):
        if step == 2:
            print("writes", os.getpid(), flush=True)
        store.save(step, write, {"config": {"step": step}, "versions": {}})
        store.prune(2)
"""
"""Forks a writer for each line, and says its process id, and how it ended."""


@pytest.mark.slow
def test_killing_the_writer_at_any_instant_leaves_a_good_latest_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    trials = 200 if os.environ.get("SPURLINE_SOAK") else 12
    command = [sys.executable, "-c", WRITER, str(store.root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdin is not None
    assert process.stdout is not None
    for trial in range(trials):
        process.stdin.write("\n")
        what, writer = process.stdout.readline().split()
        assert what == "writes", f"the writer ended by itself with {writer}"
        # Instants that do not line up with the length of a save.
        time.sleep(0.05 + 0.0137 * (trial % 23))
        os.kill(int(writer), signal.SIGKILL)
        assert process.stdout.readline().split() == ["ended", str(int(signal.SIGKILL))]
        store.clean()
        latest = store.latest()
        assert latest is not None
        parts: Any = read_state(latest.path / "components" / "source" / "any")["groups"]
        assert [part["tokens"].tolist() for part in parts] == [[number] * 9 for number in range(5)]
        assert latest.config == {"step": latest.step}
        assert 1 <= len(store.paths()) <= 3
    process.communicate(timeout=10)
