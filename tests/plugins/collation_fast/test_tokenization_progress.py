"""The progress bar: on a terminal only, and gone when the work is done."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console
from run_helpers import wait_for

from spurline_collation_fast.tokenization import parallel as tokenization_progress
from spurline_collation_fast.tokenization.parallel import show_progress


def test_nothing_is_written_where_no_one_watches(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress(10) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_the_rows_done_so_far_and_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(tokenization_progress, "Console", terminal.console)
    before = set(threading.enumerate())
    with show_progress(4000) as advance:
        assert terminal.console_options == {"stderr": True}
        advance(1500)
        wait_for(lambda: "1,500 of 4,000 rows" in terminal.screen(), "the bar to show rows")
        assert terminal.screen().startswith("tokenizing ")
        advance(2500)
        wait_for(lambda: "4,000 of 4,000 rows" in terminal.screen(), "the bar to show all rows")
        wait_for(lambda: "rows/s" in terminal.screen(), "the bar to show the speed")
    assert terminal.screen() == ""
    wait_for(lambda: set(threading.enumerate()) <= before, "the thread that draws the bar to end")


def test_an_error_takes_the_bar_away_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(tokenization_progress, "Console", terminal.console)
    with pytest.raises(ZeroDivisionError), show_progress(4000):  # noqa: PT012
        wait_for(lambda: "0 of 4,000 rows" in terminal.screen(), "the bar to be shown")
        raise ZeroDivisionError
    assert terminal.screen() == ""


class Terminal:
    """A terminal 100 columns wide, whatever the tests run in; `screen` is what a user sees on it now."""

    def __init__(self) -> None:
        self._written = io.StringIO()
        self.console_options: dict[str, object] = {}

    def console(self, **options: object) -> Console:
        """Stands in for rich's Console class."""
        self.console_options = options
        return Console(
            file=self._written,
            width=100,
            force_terminal=True,
            force_interactive=True,
            legacy_windows=False,
            _environ={"TERM": "xterm-256color"},
        )

    def screen(self) -> str:
        """The lines with something on them."""
        lines, row, column = [""], 0, 0
        for piece in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", self._written.getvalue()):
            if piece == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif piece == "\r":
                column = 0
            elif re.fullmatch(r"\x1b\[\d*A", piece):
                row -= int(piece[2:-1] or 1)
            elif piece == "\x1b[2K":
                lines[row] = ""
            elif not piece.startswith("\x1b"):
                lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
                column += len(piece)
            else:
                assert piece[-1] in "mhl", f"this terminal does not know {piece!r}"
        return "\n".join(line.rstrip() for line in lines if line.strip())
