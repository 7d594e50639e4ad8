"""The command ends as Python would, but for taking apart what was imported."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from spurline.cli_options import importing_libraries

PROGRAM = """
import atexit, sys, threading, types
if "torch" in sys.argv: sys.modules["torch"] = types.ModuleType("torch")
if "traced" in sys.argv: sys.settrace(lambda *_: None)

class Kept:
    def __del__(self, write=sys.stdout.write):
        write("taken apart\\n")

kept = Kept()
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread done"))).start()
atexit.register(print, "handler done")
del sys.argv[2:]
from spurline.cli import main
main()
"""


def left(*arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout.splitlines()[1:] if done.returncode == 0 else done.stdout.splitlines()


@pytest.mark.processes
def test_threads_and_exit_handlers_end_before_the_command_leaves_what_it_imported() -> None:
    assert left("--version", "torch") == (0, ["thread done", "handler done"])
    assert left("--no-such-option", "torch") == (2, ["thread done", "handler done"])


@pytest.mark.processes
def test_a_command_without_torch_and_one_that_is_traced_end_as_python_does() -> None:
    assert left("--version") == (0, ["thread done", "handler done", "taken apart"])
    assert left("--version", "torch", "traced") == (0, ["thread done", "handler done", "taken apart"])


def test_what_a_program_holds_when_it_calls_a_command_may_become_garbage() -> None:
    frozen = gc.get_freeze_count()
    with importing_libraries():
        pass
    assert gc.get_freeze_count() == frozen


@pytest.mark.processes
def test_the_command_line_is_also_a_module() -> None:
    command = [sys.executable, "-m", "spurline", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "train" in said
