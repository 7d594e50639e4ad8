"""Reward `math_verify`: whether response and reference are the same mathematically, by the library math-verify.

The comparison runs in a worker process: simplifying what a model wrote can take for ever, and cannot be interrupted.
"""

from __future__ import annotations

import importlib.util

from spurline.errors import ConfigError, DataError, Problem
from spurline.protocols.reward import Answer
from spurline.rl.rewards.configs import MathVerifyConfig
from spurline.rl.rewards.killable_worker import TookTooLong, WorkerPool


class MathVerify:
    """1.0 or 0.0. An answer that cannot be checked within the limits is wrong: else hanging the check would pay."""

    def __init__(self, config: MathVerifyConfig) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                [
                    Problem(
                        "reward 'math_verify'",
                        "needs the math-verify library. Install it: pip install 'spurline[math]'",
                    )
                ]
            )
        self._pool = WorkerPool("spurline.rl.rewards.math_worker:equal", config.timeout_s, config.workers)

    def score(self, answer: Answer) -> float:
        if answer.reference is None:
            raise DataError("math_verify needs a reference answer, but this row has none.")
        try:
            verdict = self._pool.call(answer.reference, answer.response)
        except TookTooLong:
            return 0.0
        if verdict is None:
            raise DataError(f"math_verify finds no mathematics in the reference {answer.reference!r}.")
        return float(verdict)

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
