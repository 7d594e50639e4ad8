"""What child processes of `test_child.py` do: the first argument names a function of this module."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

from spurline_concurrency.child import ChildProcess, Parent


def main(parent: Parent) -> None:
    globals()[parent.arguments[0]](parent, *parent.arguments[1:])


def echoes(parent: Parent) -> None:
    """Sends back what it gets, and prints in between."""
    for messages in parent.messages():
        print("this line is not a message", flush=True)
        parent.send(*messages)
    parent.send({"goodbye": True})


def hangs(parent: Parent, *also: str) -> None:
    """Run for ever in C code that handles no signal. also: start another process first."""
    others = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in also]
    parent.send({"ids": [os.getpid(), *(other.pid for other in others)]})
    max(itertools.count())


def leaves_a_process(parent: Parent) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    parent.send({"ids": [child.pid]})


def forks_and_dies(parent: Parent) -> None:
    """Die while a fork of this process lives on."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(4)


def complains(parent: Parent, code: str) -> None:
    print("giving up", file=sys.stderr, flush=True)
    os._exit(int(code))


def speaks_no_json(parent: Parent) -> None:
    os.write(parent._out.fileno(), b"{]\n")
    time.sleep(600)


def breaks_off(parent: Parent) -> None:
    parent.send({"whole": 1})
    os.write(parent._out.fileno(), b'{"half": ')


def sleeps(parent: Parent) -> None:
    parent.send({"ids": [os.getpid()]})
    time.sleep(600)


def start_and_wait(task: str) -> None:
    """Start a child, print the ids that it sends, and wait to be killed."""
    ChildProcess(
        __name__, (task,), take=lambda messages: print(*messages[0]["ids"], flush=True), on_end=lambda child: None
    )
    time.sleep(600)
