"""Reward `math_verify`: whether response and reference are the same mathematically, by the library math-verify.

The comparison runs in a worker process: simplifying what a model wrote can take for ever, and cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

from spurline.errors import ConfigError, DataError
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import MathVerifyConfig
from spurline_rl.rewards.killable import KillablePool, TookTooLong
from spurline_rl.rewards.references import required_reference


class MathVerify:
    """1.0 or 0.0. An answer that cannot be checked within the limits is wrong: else hanging the check would pay."""

    def __init__(self, config: MathVerifyConfig) -> None:
        if importlib.util.find_spec("math_verify") is None:
            missing = "needs the math-verify library. Install it: pip install 'spurline-rl[math]'"
            raise ConfigError.at("reward 'math_verify'", missing)
        self._pool = KillablePool(f"{__name__}:equal", config.timeout_s, config.workers, imports=("math_verify",))

    def score(self, answer: Answer) -> float:
        """Score as `score_async` does, for callers without an event loop."""
        return asyncio.run(self.score_async(answer))

    async def score_async(self, answer: Answer) -> float:
        reference = required_reference(answer, "math_verify")
        try:
            verdict = await self._pool.call_async(reference, answer.response)
        except TookTooLong:
            return 0.0
        if verdict is None:
            raise DataError(f"math_verify finds no mathematics in the reference {reference!r}.")
        return float(verdict)

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()


def equal(reference: str, response: str) -> bool | None:
    """Return whether the response ends in what the reference says; None if the reference cannot be parsed.

    Runs in a worker process, where the library and its sympy have been imported, which takes seconds.
    """
    import math_verify  # pyright: ignore[reportMissingImports]

    def parse(text: str) -> list[Any]:
        # No time limits of the library's own: they are signals, and this process is killed when it takes too long.
        return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    gold = parse(reference) or parse(f"${reference}$")
    return bool(math_verify.verify(gold, parse(response), timeout_seconds=None)) if gold else None
