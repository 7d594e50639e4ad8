"""What a run writes about itself, on a disk that takes nothing more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spurline.errors import RunFailedError
from spurline.run import directory
from spurline.run.directory import RunDirectory, RunRecordFiles


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
def test_a_full_disk_is_named_with_the_file_of_sample_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "own_file", lambda path, flags: os.open("/dev/full", flags))
    files = RunRecordFiles(RunDirectory(tmp_path), {})
    with pytest.raises(RunFailedError, match=r"eval_samples\.jsonl: cannot be written: No space left on device"):
        files.add_samples(1, [{"response": "a"}])
