"""`spurline cache` whose output cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spurline.cli import main


def test_an_output_that_cannot_be_written_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as output:
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(SystemExit) as raised:
            main(["cache", "path"])
    assert (raised.value.code, sys.stdout) == (1, output)
    assert capsys.readouterr().err == "Error: standard output cannot be written: No space left on device.\n"
