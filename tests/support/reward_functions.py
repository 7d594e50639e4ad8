"""Functions that tests name in configs as rewards, tools and worker functions."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import threading
import time
import zlib
from concurrent.futures import CancelledError
from typing import Any

from spurline.protocols.held_out import HeldOutEvaluation
from spurline_rl.protocols.reward import Answer

release = threading.Event()
"""Lets `hangs` go, so that no thread outlives its test."""

NOT_A_FUNCTION = 3


def in_process(path: str) -> dict[str, Any]:
    """Settings of a reward that starts no process, for tests that are about something else."""
    return {"name": "function", "path": path, "in_process": True}


def length(answer: Answer) -> float:
    return float(len(answer.response))


def early_letters(answer: Answer) -> float:
    """Share of an answer's letters that are in the first half of the alphabet, which any model can learn."""
    letters = [letter for letter in answer.response.lower() if letter.isalpha()]
    return sum(letter < "n" for letter in letters) / max(1, len(letters))


def by_chance(answer: Answer) -> float:
    """Gives equal attempts different rewards."""
    return random.random()


def any_action(text: str) -> int:
    """Return an action of Taxi-v4 for any text, except that one in twenty fails."""
    seen = zlib.crc32(text.encode())
    if seen % 20 == 0:
        raise ConnectionError("the taxi is gone")
    return seen % 6


async def length_later(answer: Answer) -> float:
    await asyncio.sleep(0)
    return float(len(answer.response))


def two_arguments(prompt: str, response: str) -> float:
    return 0.0


def raises(answer: Answer) -> float:
    raise ValueError("no such unit")


def reads_a_variable(answer: Answer) -> float:
    return float(os.environ["NO_SUCH_VARIABLE"])


def is_cancelled(answer: Answer) -> float:
    raise CancelledError("the pool was closed")


def times_out(answer: Answer) -> float:
    raise TimeoutError("no answer")


def exits(answer: Answer) -> float:
    sys.exit(2)


def text(answer: Answer) -> str:
    return "1.0"


def forgets(answer: Answer) -> None: ...


def hangs(answer: Answer) -> float:
    release.wait(60)
    return 1.0


def echo(text: Any, times: int = 1) -> Any:
    """Return the text, repeated."""
    return text * times


def add(left: int, right: int = 1) -> int:
    """Add two numbers."""
    return left + right


def fails(reason: str) -> str:
    raise KeyError(reason)


def sleeps(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def spins() -> None:
    """Run forever, in C code that hears no signal."""
    max(itertools.count())


def process_ids() -> list[int]:
    return [os.getpid(), os.getppid()]


async def named_like_our_own(what: int, function: int, timeout_s: int) -> list[int]:
    return [what, function, timeout_s]


def compares_for_ever(reference: str, response: str) -> bool:
    time.sleep(600)
    return reference == response


class Closing:
    """A reward that counts how often it was closed."""

    closed = 0

    def __init__(self, config: object) -> None:
        self.config = config

    def score(self, answer: Answer) -> float:
        return 1.0

    def close(self) -> None:
        Closing.closed += 1


class Careful(HeldOutEvaluation):
    """An evaluation of a third party, which measures the number of steps."""

    def __init__(self, config: Any, context: Any) -> None:
        self.config, self.context = config, context

    def summary(self) -> dict[str, Any]:
        return {"prompts": 1}

    def fingerprint(self) -> str:
        return "same"

    def evaluate(self, backend: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
        return {self.config.metric: float(self.context.source.total_steps)}, []

    def close(self) -> None:
        Closing.closed += 1
