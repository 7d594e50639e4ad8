"""The progress bar: on a terminal only, and gone when the work is done."""

from __future__ import annotations

import pytest

from spurline_collation_fast.tokenization_progress import show_progress


def test_nothing_is_written_where_no_one_watches(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress(10) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")
