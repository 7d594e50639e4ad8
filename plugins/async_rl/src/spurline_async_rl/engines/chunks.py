"""Tokens of many responses, gathered where they are written until enough of one are there to be told.

Place on the way: engine in a process of its own -> Chunks, in that process -> message -> Progress in the controller's.
Each message costs the controller the same, however many tokens it tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from spurline_async_rl.engines.progress import Progress
from spurline_rl.engines.in_process.response import Written
from spurline_rl.trajectory import FinishReason

_LONGEST_S = 1.0


def longest_wait_s(generate_timeout_s: float) -> float:
    """Return the seconds that a token may wait to be told: silence that long is no sign of a dead engine."""
    return min(_LONGEST_S, generate_timeout_s / 4)


class Chunks:
    """The tokens of requests that have not been told yet. All methods are called on one event loop.

    size: tokens of one response that are told together. longest_s: seconds until fewer are told. tell: called with a
    request's number, its next tokens and, with the last ones, why the response ended.
    """

    def __init__(
        self, size: int, longest_s: float, tell: Callable[[int, Progress, FinishReason | None], object]
    ) -> None:
        self._size = size
        self._longest_s = longest_s
        self._tell = tell
        self._untold: dict[int, Progress] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, number: int, news: Written) -> None:
        """Take the next tokens of a request, all of one version."""
        chunk = self._untold.get(number)
        if chunk is None:
            chunk = self._untold[number] = Progress()
        (version,) = set(news.versions)
        chunk.add(news.token_ids, news.logprobs, news.raw_logprobs, version)
        if news.routed_experts is not None:
            chunk.experts.add(len(chunk.experts), news.routed_experts)
        if news.finish_reason is not None or len(chunk) >= self._size:
            del self._untold[number]
            self._tell(number, chunk, news.finish_reason)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._longest_s, self.flush)

    def flush(self) -> None:
        """Tell all that was written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        untold, self._untold = self._untold, {}
        for number, chunk in untold.items():
            self._tell(number, chunk, None)

    def forget(self, number: int) -> None:
        """Nobody waits for this request any more."""
        self._untold.pop(number, None)
