"""`spurline --help` sums up the commands of plugins without importing them."""

from __future__ import annotations

from spurline.plugins.host import installed_commands


def test_every_installed_command_says_what_it_does() -> None:
    summaries = {name: entry.summary() for name, entry in installed_commands().items()}
    assert summaries
    assert not [name for name, line in summaries.items() if line.startswith(("(of ", "of ")) or not line.endswith(".")]
