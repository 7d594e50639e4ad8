"""What a run writes about itself, on a disk that takes nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest

from spurline.errors import RunFailedError
from spurline.run.directory import RunDirectory, RunRecordFiles


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
def test_a_full_disk_is_named_with_the_file_of_sample_answers(tmp_path: Path) -> None:
    (tmp_path / "eval_samples.jsonl").symlink_to("/dev/full")
    files = RunRecordFiles(RunDirectory(tmp_path), {})
    with pytest.raises(RunFailedError, match=r"eval_samples\.jsonl: cannot be written: No space left on device"):
        files.add_samples(1, [{"response": "a"}])
