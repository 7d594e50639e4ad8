"""Reward `function`: a Python function named in the config, with limits of time and memory.

def short_and_right(answer: Answer) -> float:
    return float(answer.reference in answer.response) - 0.001 * len(answer.response)
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from spurline.errors import ConfigError, RunFailedError
from spurline_rl.concurrency import is_async, within
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import FunctionRewardConfig
from spurline_rl.rewards.killable import KillablePool, OutOfMemory, TookTooLong
from spurline_rl.rewards.references import missing_reference
from spurline_rl.rewards.sent_answers import pack, unpack

_SHOWN_CHARACTERS = 300
_HOPELESS_CALLS = 8
"""Calls that have run into the limit, for three times as long as it is, after which none is expected to return."""


class FunctionReward:
    """Call `path` with the Answer, in worker processes that are killed at its limits.

    With `in_process` the call is made in this process: of a plain function on a thread, which is abandoned when it
    takes too long; of an async one on the event loop of the run.
    """

    def __init__(self, config: FunctionRewardConfig) -> None:
        self._config = config
        self._has_ended_one = False
        self._num_late, self._first_late_at = 0, 0.0
        self._pool: KillablePool | None = None
        if config.in_process:
            self._function = _load(config.path)
            return
        if config.path.startswith("__main__:"):
            raise ConfigError.at(
                f"reward function {config.path}",
                "is in the script or notebook that runs, which worker processes do not import. Write it in a file, and "
                "name that: `my_rewards.py:...`; or set `in_process: true`.",
            )
        self._pool = KillablePool(
            config.path,
            config.timeout_s,
            0 if config.workers == "auto" else config.workers,
            adapter=f"{__name__}:in_worker",
            import_timeout_s=config.import_timeout_s,
            memory_bytes=round(config.memory_gb * 2**30),
            shows_output=True,
        )
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    def score(self, answer: Answer) -> float:
        """Score as `score_async` does, for callers without an event loop."""
        return asyncio.run(self.score_async(answer))

    async def score_async(self, answer: Answer) -> float:
        """Return what the function returns.

        Raises:
            AttemptFailedError: If it takes more than `timeout_s` or `memory_gb`, or ends its process.
            DataError: If the row cannot be sent there.
            RunFailedError: If every call so far has taken longer.
            Exception: What the function raises, if it is called in this process.
        """
        try:
            value = await self._value(answer)
        except Exception as error:
            cause = error.__cause__
            is_late = isinstance(error, AttemptFailedError) and isinstance(cause, TimeoutError | TookTooLong)
            if is_late and not isinstance(cause, OutOfMemory):
                self._count_late()
            else:
                self._has_ended_one = True
            raise
        self._has_ended_one = True
        # The check of scores says what it is instead of a number.
        return _Shown(value["shown"]) if isinstance(value, dict) else value  # pyright: ignore[reportReturnType]

    async def _value(self, answer: Answer) -> Any:
        what, limit_s = f"The function {self._config.path}", self._config.timeout_s
        if self._pool is None:
            return await within(limit_s, what, self._function, answer)
        try:
            return await self._pool.call_async(pack(answer))
        except OutOfMemory as error:
            raise AttemptFailedError(f"{what} took more than memory_gb: {self._config.memory_gb:g}.") from error
        except TookTooLong as error:
            raise AttemptFailedError(f"{what} did not return within {limit_s:g} s.") from error
        except AttemptFailedError as error:
            if not (hint := missing_reference(answer)):
                raise
            raise AttemptFailedError(f"{str(error).rstrip('.')}. {hint}") from error

    def _count_late(self) -> None:
        """Raise RunFailedError when retries have no prospect either: else they cost every prompt its whole limit."""
        now, limit_s = time.monotonic(), self._config.timeout_s
        self._first_late_at = self._first_late_at if self._num_late else now
        self._num_late += 1
        if self._has_ended_one or self._num_late < _HOPELESS_CALLS or now - self._first_late_at < 2 * limit_s:
            return
        raise RunFailedError(
            f"All {self._num_late} calls of {self._config.path} so far have run into timeout_s: {limit_s:g}. Look for "
            "what it waits for, or raise timeout_s."
        )

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()


def in_worker(path: str) -> Callable[..., Any]:
    """Return the function as a worker process calls it: with what `pack` gives, and numbers of JSON as results.

    Raises:
        PluginError: If the function cannot be found.
        ConfigError: If it cannot be called.
    """
    function = _load(path)

    def call(packed: str) -> Any:
        return _sendable(function(unpack(packed)))

    async def call_async(packed: str) -> Any:
        return _sendable(await function(unpack(packed)))

    return call_async if is_async(function) else call


class _Shown:
    """A value that stayed in another process."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _sendable(value: Any) -> Any:
    """Numbers, also of numpy and torch, as JSON has them; what is none as it is shown."""
    if value is not None and not isinstance(value, (int, float)) and getattr(value, "shape", None) == ():
        value = value.item()
    return value if value is None or isinstance(value, (int, float)) else {"shown": repr(value)[:_SHOWN_CHARACTERS]}


def _load(path: str) -> Callable[..., Any]:
    function = load_function(path, "reward function")
    _check_signature(function, path)
    return function


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
