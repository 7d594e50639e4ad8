"""The progress bar: on a terminal only, and gone when the work is done."""

from __future__ import annotations

import functools
import io
import threading

import pytest
from rich.console import Console

from spurline_collation_fast import tokenization_progress
from spurline_collation_fast.tokenization_progress import show_progress


def test_nothing_is_written_where_no_one_watches(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress(10) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_rows_done_and_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = io.StringIO()
    terminal = functools.partial(Console, file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(tokenization_progress, "Console", lambda stderr: terminal())
    threads = threading.active_count()
    with show_progress(4000) as advance:
        advance(1500)
        advance(2500)
    assert "4,000 of 4,000 rows" in screen.getvalue()
    # The last thing written erases the line.
    assert screen.getvalue().endswith("\x1b[2K")
    assert threading.active_count() == threads
