"""Reward `math_verify`: compare response and reference as mathematics, with the library math-verify.

The comparison runs in a worker process: simplifying a model's answer can take forever, and cannot be interrupted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from spurline.errors import ConfigError, DataError
from spurline_concurrency.killable import KillablePool, TookTooLong
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import MathVerifyConfig
from spurline_rl.rewards.matching import required_reference


class MathVerify:
    """A reward of 1.0 or 0.0. An answer that cannot be checked within the limits gets 0.0."""

    def __init__(self, config: MathVerifyConfig) -> None:
        if importlib.util.find_spec("math_verify") is None:
            missing = "needs the math-verify library. Install it: pip install 'spurline-rl[math]'"
            raise ConfigError.at("reward 'math_verify'", missing)
        self._pool = KillablePool(f"{__name__}:comparer", config.timeout_s, config.workers, argument="math_verify")

    async def score(self, answer: Answer) -> float:
        reference = required_reference("math_verify", answer.reference, answer.row)
        try:
            verdict = await self._pool.call_async(reference, answer.response)
        except TookTooLong:
            return 0.0
        if verdict is None:
            raise DataError(f"math_verify finds no mathematics in the reference {reference!r}.")
        return float(verdict)

    def close(self) -> None:
        self._pool.close()


def comparer(_: str) -> Callable[[str, str], bool | None]:
    """Import the library, which takes seconds, and return the comparison that worker processes make."""
    import math_verify  # pyright: ignore[reportMissingImports]

    # The library's own time limit uses signals and is turned off. This process is killed if it takes too long.
    parse: Any = partial(math_verify.parse, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def equal(reference: str, response: str) -> bool | None:
        """Return whether the response's final answer equals the reference; None if the reference cannot be parsed."""
        gold = parse(reference) or parse(f"${reference}$")
        return bool(math_verify.verify(gold, parse(response), timeout_seconds=None)) if gold else None

    return equal
