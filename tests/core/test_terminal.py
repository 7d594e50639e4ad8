"""What others have written is shown on a terminal, not obeyed by it; and an output that cannot be written is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from spurline.cli import main
from spurline.plugins import listing as plugin_listing
from spurline.terminal import OutputLostError, output_told_apart, printable, write_nowhere


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


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["schema"], ["plugins"], ["shout", "--words=a"]],
    ids=lambda words: words[-1],
)
def test_an_output_that_cannot_be_written_is_an_error_of_one_line(
    bare: None, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Closing writes what is in the buffer, as the end of the process does, and must not fail again.
    with Path("/dev/full").open("w", encoding="utf-8") as output:
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(SystemExit) as raised:
            main(words)
    assert (raised.value.code, sys.stdout) == (1, output)
    assert capsys.readouterr().err == "Error: standard output cannot be written: No space left on device.\n"


def test_what_is_in_the_buffer_at_the_end_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as output:
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(OutputLostError, match="No space left"), output_told_apart():
            print("not flushed")
        write_nowhere(output.fileno())


def test_other_failures_of_the_system_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plugin_listing, "installed_lines", fail)
    with pytest.raises(OSError, match="No space left") as raised:
        main(["plugins"])
    assert type(raised.value) is OSError


def test_a_reader_that_has_gone_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", os.fdopen(writer, "w"))
    with pytest.raises(SystemExit):
        main(["schema"])
    assert capsys.readouterr().err == ""
