"""Imports of large libraries: a process of our own hides them from the garbage collector, and ends without noise."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, sys
from spurline.importing import importing, own_process
if sys.argv[1] == "own":
    own_process()
with importing():
    import torch
print(gc.get_freeze_count() > 100_000, gc.isenabled())
print("an error of the process", file=sys.stderr)
"""


@pytest.mark.processes
@pytest.mark.parametrize("whose", ["own", "other"])
def test_only_a_process_of_our_own_hides_what_it_imports(whose: str) -> None:
    made = subprocess.run([sys.executable, "-c", SCRIPT, whose], capture_output=True, text=True, check=True)
    assert made.stdout == f"{whose == 'own'} True\n"
    assert made.stderr == "an error of the process\n"
