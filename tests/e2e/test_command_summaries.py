"""`spurline --help` sums up the commands of plugins without importing them."""

from __future__ import annotations

import sys

import pytest

from spurline.plugins.host import CommandEntry, installed_commands


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("spurline_planning.commands:plan", "Check config, data and memory, and say what training would do."),
        ("spurline_plugin_template.command:command", "`spurline step-times RUN_DIR`: print"),
    ],
)
def test_a_command_is_summed_up_without_being_imported(target: str, line: str) -> None:
    imported = set(sys.modules)
    assert CommandEntry("x", "spurline-x", target, None).summary().startswith(line)
    assert {name for name in set(sys.modules) - imported if name.endswith(("command", "commands"))} == set()


def test_every_installed_command_says_what_it_does() -> None:
    summaries = {name: entry.summary() for name, entry in installed_commands().items()}
    assert summaries
    assert not [name for name, line in summaries.items() if line.startswith(("(of ", "of ")) or not line.endswith(".")]
