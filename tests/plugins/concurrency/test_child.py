"""One child process: what it says is heard, what it is told arrives, and nothing of it is left over."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from living_processes import is_alive
from run_helpers import wait_for

from spurline_concurrency.child import ChildProcess

pytestmark = pytest.mark.processes


class Heard:
    """A child process, and what came from it: messages, and at last None."""

    def __init__(self, *arguments: str, **settings: Any) -> None:
        self.queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.ends: list[ChildProcess] = []
        self.child = ChildProcess("child_modules", arguments, take=self._take, on_end=self._note_end, **settings)

    def next(self) -> Any:
        return self.queue.get(timeout=60)

    def _take(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            self.queue.put(message)

    def _note_end(self, child: ChildProcess) -> None:
        self.ends.append(child)
        self.queue.put(None)


Start = Callable[..., Heard]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a function of child_modules.py; afterwards no thread is left, and every end was told once."""
    heard: list[Heard] = []

    def start(*arguments: str, **settings: Any) -> Heard:
        heard.append(Heard(*arguments, **settings))
        return heard[-1]

    yield start
    for each in heard:
        each.child.end()
        assert each.ends == [each.child]
    assert not [thread.name for thread in threading.enumerate() if thread.name == "child-child_modules"]


def test_messages_arrive_whole_and_in_order_in_both_directions(start: Start) -> None:
    heard = start("echoes")
    # Longer than a pipe holds; neither side waits for the other to read.
    messages = [
        {"number": number, "text": "é" * (300_000 if number % 10 == 0 else 3), **attached}
        for number in range(50)
        for attached in ({}, {"one": b"\n" * number, "two": bytes(1_000_003 if number == 20 else number)})
    ]
    for message in messages:
        heard.child.send(message)
    assert [heard.next() for _ in messages] == messages
    heard.child.close_input()
    assert heard.next() == {"goodbye": True}
    assert heard.next() is None
    assert heard.child.how_it_ended == "exit code 0"
    assert heard.child.last_words().startswith("this line is not a message")


def test_an_end_in_order_lets_it_finish_what_it_was_told(start: Start) -> None:
    heard = start("echoes")
    heard.child.send({"last": True})
    heard.child.end(patience_s=60)
    assert [heard.next() for _ in range(3)] == [{"last": True}, {"goodbye": True}, None]
    heard.child.send({"too": "late"})


def test_sending_to_one_that_does_not_listen_returns_at_once_and_it_can_be_ended(start: Start) -> None:
    heard = start("sleeps")
    for _ in range(20):
        heard.child.send({"text": "x" * 100_000})
    heard.child.end()
    assert heard.child.exit_code == -signal.SIGKILL


def test_ending_it_ends_what_it_has_started_also_when_it_hears_no_signal(start: Start) -> None:
    heard = start("hangs", "and another")
    ids = heard.next()["ids"]
    assert all(map(is_alive, ids))
    heard.child.end()
    wait_for(lambda: not any(map(is_alive, ids)), "the end of both")
    assert heard.child.how_it_ended == "killed by SIGKILL"


def test_what_it_leaves_running_ends_with_it(start: Start) -> None:
    heard = start("leaves_a_process")
    (left,) = heard.next()["ids"]
    assert heard.next() is None
    wait_for(lambda: not is_alive(left), "the end of what it left")
    assert heard.child.how_it_ended == "exit code 0"


def test_a_death_is_noticed_while_a_fork_of_the_process_lives_on(start: Start) -> None:
    heard = start("forks_and_dies")
    assert heard.next() is None
    assert heard.child.how_it_ended == "exit code 4"


@pytest.mark.parametrize("in_file", [False, True])
def test_a_death_is_noticed_with_how_it_came_and_the_last_words(start: Start, tmp_path: Path, in_file: bool) -> None:
    log = tmp_path / "log"
    log.write_text("an earlier life\n")
    heard = start("complains", "3", log=log if in_file else None)
    assert heard.next() is None
    assert heard.child.how_it_ended == "exit code 3"
    assert heard.child.last_words() == "giving up"


def test_a_death_by_a_signal_without_a_name_is_told_by_its_number(start: Start) -> None:
    heard = start("sleeps")
    os.kill(heard.child.pid, signal.SIGRTMIN + 2)
    assert heard.next() is None
    assert heard.child.how_it_ended == f"killed by signal {signal.SIGRTMIN + 2}"


def test_a_message_that_was_broken_off_says_nothing(start: Start) -> None:
    heard = start("breaks_off")
    assert [heard.next(), heard.next()] == [{"whole": 1}, None]


def test_one_that_speaks_no_json_is_ended_and_says_why(start: Start) -> None:
    heard = start("speaks_no_json")
    assert heard.next() is None
    assert "its messages cannot be read: JSONDecodeError" in heard.child.how_it_ended


def test_a_process_that_cannot_be_started_is_an_error_where_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        Heard("echoes")
    wait_for(lambda: threading.active_count() == before, "the end of its thread")


def test_it_lives_on_when_the_thread_that_asked_for_it_has_ended(start: Start) -> None:
    started: list[Heard] = []
    thread = threading.Thread(target=lambda: started.append(start("echoes")))
    thread.start()
    thread.join()
    # Linux would tell a process at once that the thread which started it is gone.
    time.sleep(0.5)
    started[0].child.send({"are": "you there"})
    assert started[0].next() == {"are": "you there"}


def test_it_does_not_outlive_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", "import child_modules; child_modules.start_and_wait('hangs')"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait(10)
    wait_for(lambda: not is_alive(child), "the end of the child")
