"""What others have written is shown on a terminal, not obeyed by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spurline.cli import main
from spurline.terminal import printable


def test_control_characters_are_shown_and_everything_else_stays() -> None:
    assert printable("\x1b[2J\r\x9b\x00\ud83d") == r"\x1b[2J\r\x9b\x00\ud83d"
    assert printable("a\tb\nc é 😀 \\x1b") == "a\tb\nc é 😀 \\x1b"


def test_an_error_with_escape_sequences_in_it_is_printed_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text('"\\e]0;mine\\a": 1\nmodel: {path: m}\ndata: {train: rows.jsonl}\nsteps: 1\n')
    with pytest.raises(SystemExit):
        main(["train", str(config)])
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert r"\x1b]0;mine\x07" in shown


def test_a_reader_that_has_gone_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", os.fdopen(writer, "w"))
    with pytest.raises(SystemExit):
        main(["schema"])
    assert capsys.readouterr().err == ""


@pytest.mark.processes
def test_the_command_line_is_also_a_module() -> None:
    command = [sys.executable, "-m", "spurline", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "train" in said
