"""Links among the files of a run are not followed, and a private folder belongs to one user."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spurline.errors import CheckpointError, DamagedCheckpointError, RunDirectoryError, RunFailedError, UserError
from spurline.files import private_folder, write_text
from spurline.run.checkpoints.checkpoint import MANIFEST, CheckpointStore, open_checkpoint
from spurline.run.checkpoints.state_files import read_state
from spurline.run.directory import RunDirectory, RunRecordFiles
from spurline_concurrency.child import ChildProcess
from spurline_insight.report.record import read_record
from spurline_models.export import _write_beside  # pyright: ignore[reportPrivateUsage]
from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER, KeptRollouts
from spurline_text.datasets import arrow_rows

FACTS = {"config": {"seed": 0}, "versions": {"spurline": "0"}}


def fill(folder: Path) -> None:
    (folder / "run.json").write_text("{}")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder that is not the run's."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


def test_links_among_leftovers_are_unlinked_and_what_they_point_to_stays(
    store: CheckpointStore, precious: Path
) -> None:
    store.save(1, fill, FACTS)
    (store.root / ".writing-step-00000002-1").symlink_to(precious)
    (store.root / ".removing-step-00000001-1").symlink_to(precious / "thesis.txt")
    (store.root / ".latest.1.tmp").symlink_to("nowhere")
    folder = store.root / ".writing-step-00000003-1"
    folder.mkdir()
    (folder / "inside").symlink_to(precious)
    store.clean()
    assert sorted(os.listdir(store.root)) == ["latest", "step-00000001"]
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_link_in_place_of_a_checkpoint_is_replaced_put_aside_and_pruned(
    store: CheckpointStore, precious: Path
) -> None:
    store.root.mkdir()
    (store.root / "step-00000001").symlink_to(precious)
    (store.root / "step-00000002").symlink_to("nowhere")
    (store.root / f".writing-step-00000002-{os.getpid()}").symlink_to(precious)
    (store.root / "superseded-step-00000009").symlink_to("nowhere")
    (store.root / "step-00000009").symlink_to(precious)
    store.save(2, fill, FACTS)
    assert [path.name for path in store.set_aside_after(2)] == ["superseded-step-00000009"]
    store.prune(1)
    assert [path.name for path in store.paths()] == ["step-00000002"]
    assert not (store.root / "step-00000002").is_symlink()
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_what_only_looks_like_a_checkpoint_is_none(store: CheckpointStore) -> None:
    good = store.save(3, fill, FACTS)
    for name in ("step-", "step-latest", "step-00000009.old", f"step-{'9' * 5000}"[:200]):
        (store.root / name).mkdir()
    assert store.paths() == [good]
    assert store.set_aside_after(1) == [store.root / "superseded-step-00000003"]


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../secret": {"bytes": 6, "xxh3": "0"}}},
        {"files": {"/etc/passwd": {"bytes": 6, "xxh3": "0"}}},
        {"files": {"a\0b": {"bytes": 6, "xxh3": "0"}}},
        {"files": {"run.json": {"bytes": "2"}}},
        {"files": ["run.json"]},
        {"step": "3"},
        {"config": None},
        '{"a":' * 20_000,
    ],
    ids=lambda change: str(change)[:30],
)
def test_a_manifest_that_lists_no_files_of_its_folder_is_damage(change: Any, store: CheckpointStore) -> None:
    path = store.save(3, fill, FACTS)
    written = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(change if isinstance(change, str) else json.dumps(written | change))
    with pytest.raises(CheckpointError, match=r"step-00000003 is damaged: .*manifest\.json|not valid JSON"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "arrays"),
    [
        ("", None),
        ('{"a":' * 20_000, None),
        ("[]", None),
        ('{"parts": 3, "state": {}}', None),
        ('{"state": {"__array__": "other"}}', None),
        ('{"state": {"__parts__": 0}}', None),
        ('{"state": {}}', b"\xff" * 32),
        ('{"state": {}}', (2**60).to_bytes(8, "little") + b"{}"),
    ],
    ids=["empty", "deep", "list", "parts", "no array", "no part", "no safetensors", "long header"],
)
def test_a_state_of_others_is_damage_and_no_crash(content: str, arrays: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(content)
    if arrays is not None:
        (tmp_path / "state.safetensors").write_bytes(arrays)
    with pytest.raises(DamagedCheckpointError, match=r"state\.json is damaged"):
        read_state(tmp_path / "state")


def test_an_export_replaces_a_link_and_not_the_folder_that_it_points_to(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "model").symlink_to(precious)
    assert _write_beside(tmp_path / "model", "model", fill) == tmp_path / "model"
    assert not (tmp_path / "model").is_symlink()
    assert os.listdir(precious) == ["thesis.txt"]
    # A link to a new or empty folder says where the user has room.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert _write_beside(tmp_path / "out", "model", fill) == tmp_path / "elsewhere"
    assert os.listdir(tmp_path / "out") == ["run.json"]


def test_a_file_written_beside_follows_no_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / f".config.json.{os.getpid()}.tmp").symlink_to(precious / "thesis.txt")
    write_text(tmp_path / "config.json", "{}")
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_private_folder_is_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "shared" / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(private_folder(folder).stat().st_mode) == 0o700


def test_a_folder_of_others_is_not_used(tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.symlink_to(precious)
    with pytest.raises(UserError, match=r"cache: must be a private folder.*TMPDIR"):
        private_folder(folder)
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UserError, match=r"others may write into it"):
        private_folder(folder)
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match=r"it belongs to the user with number"):
        private_folder(folder)


def test_tables_are_kept_in_a_private_folder_where_the_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = arrow_rows._cache_folder()  # pyright: ignore[reportPrivateUsage]
    assert folder == tmp_path / f"spurline-datasets-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("eval_samples.jsonl", lambda path: RunRecordFiles(RunDirectory(path), {}).add_samples(1, [{"answer": "4"}])),
        ("engine.log", lambda path: ChildProcess("spurline.none", take=print, on_end=print, log=path / "engine.log")),
        ("run.lock", lambda path: RunDirectory(path).open()),
    ],
)
def test_a_file_that_a_run_adds_to_follows_no_link(
    name: str, write: Callable[[Path], object], tmp_path: Path, precious: Path
) -> None:
    (tmp_path / name).symlink_to(precious / "thesis.txt")
    with pytest.raises((RunFailedError, RunDirectoryError, OSError), match="is a link"):
        write(tmp_path)
    assert (precious / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.jsonl", read_record),
        ("summary.json", read_record),
        (f"{ROLLOUTS_FOLDER}/step-000001.parquet", lambda folder: list(KeptRollouts(folder).attempts())),
    ],
)
def test_a_pipe_in_place_of_a_file_of_a_run_is_not_waited_for(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunDirectoryError, match="it is not a regular file"):
        read(tmp_path)
