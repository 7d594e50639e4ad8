"""Reward `function`: a Python function named in the config, with a time limit.

def short_and_right(answer: Answer) -> float:
    return float(answer.reference in answer.response) - 0.001 * len(answer.response)
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from spurline.errors import ConfigError
from spurline.protocols.reward import Answer
from spurline.rl.concurrency import within
from spurline.rl.functions import load_function
from spurline.rl.rewards.configs import FunctionRewardConfig


class FunctionReward:
    """Call `path` with the Answer. A plain function runs on a thread, which is abandoned when it takes too long."""

    def __init__(self, config: FunctionRewardConfig) -> None:
        self._config = config
        self._function = load_function(config.path, "reward function")
        _check_signature(self._function, config.path)

    def score(self, answer: Answer) -> float:
        """For callers without an event loop."""
        return asyncio.run(self.score_async(answer))

    async def score_async(self, answer: Answer) -> float:
        """What the function returns or raises; AttemptFailedError when it takes longer than `timeout_s`."""
        return await within(self._config.timeout_s, f"The function {self._config.path}", self._function, answer)


def _check_signature(function: Any, path: str) -> None:
    """Raise ConfigError for a function that one argument does not fit."""
    name = path.rpartition(":")[2]
    signature: inspect.Signature | None = None
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except ValueError:
        # Some functions written in C do not tell; the first call will.
        return
    except TypeError:
        problem = (
            f"is of type {type(function).__name__}, not a function"
            if signature is None
            else f"is defined as {name}{signature}, but is called with one argument"
        )
        expected = f"Write `def {name}(answer)`; answer has prompt, response, reference, row and messages."
        raise ConfigError.at(f"reward function {path}", f"{problem}. {expected}") from None
