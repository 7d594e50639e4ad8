"""RUN_DIR after kills: what was begun there goes, and what an earlier attempt left is kept together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from spurline.errors import RunFailedError
from spurline.files import write_text
from spurline.run import directory
from spurline.run.directory import RunDirectory, RunRecordFiles


def test_what_a_killed_process_began_to_write_is_removed_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path, tmp_path / "groups"]
    places[1].mkdir()
    with monkeypatch.context() as patch:
        # Nothing that the process does after this instant happens.
        patch.setattr(Path, "replace", lambda *_: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        for place in places:
            write_text(place / "summary.json", "{}")
    assert all([*place.glob(".*.tmp")] for place in places)
    own = [tmp_path / ".notes.tmp", tmp_path / "draft.7.tmp"]
    for path in own:
        path.touch()
    opened = RunDirectory(tmp_path)
    opened.open()
    opened.close()
    left = sorted(path.name for path in tmp_path.rglob("*.tmp"))
    assert left == sorted(path.name for path in own)


def test_an_attempt_is_set_aside_as_a_whole_also_when_a_kill_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDirectory(tmp_path)
    # Rollouts too, though this run tells of none: what the earlier one wrote is in its summary.
    summary = {"records": ["rollouts", "../elsewhere", "never-written"]}
    names = ["config.json", "eval_samples.jsonl", "metrics.jsonl", "rollouts", "timeline.jsonl"]
    for name in names:
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    names = sorted([*names, "summary.json"])
    moved, rename = [], Path.rename

    def rename_once(path: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_once)
        with pytest.raises(KeyboardInterrupt):
            run_dir.set_aside_earlier(["timeline.jsonl"])
    assert "1 steps of an earlier attempt" in (run_dir.set_aside_earlier(["timeline.jsonl"]) or "")
    assert not [*tmp_path.glob("*.json*")]
    assert sorted(path.name for path in tmp_path.glob("before-*/*")) == names
    assert run_dir.set_aside_earlier(["timeline.jsonl"]) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
def test_a_full_disk_is_named_with_the_file_of_sample_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "own_file", lambda path, flags: os.open("/dev/full", flags))
    files = RunRecordFiles(RunDirectory(tmp_path), {})
    with pytest.raises(RunFailedError, match=r"eval_samples\.jsonl: cannot be written: No space left on device"):
        files.add_samples(1, [{"response": "a"}])
