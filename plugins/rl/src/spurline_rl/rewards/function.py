"""Reward `function`: a Python function that the config names, with limits of time and memory.

def short_and_right(answer: Answer) -> float:
    return float(answer.reference in answer.response) - 0.001 * len(answer.response)
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spurline.errors import ConfigError, DataError
from spurline_concurrency.calls import within
from spurline_concurrency.killable import KillablePool, TookTooLong
from spurline_models.machine import num_cores
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.rewards.configs import FunctionRewardConfig
from spurline_rl.rewards.matching import missing_reference


class FunctionReward:
    """Calls the function `path` in worker processes, which are killed if they exceed a limit.

    With `in_process` the call is made in this process. A plain function runs on a thread, which is abandoned if it
    takes too long. An async function runs on the event loop of the run.
    """

    def __init__(self, config: FunctionRewardConfig) -> None:
        self._config = config
        self._pool: KillablePool | None = None
        if config.in_process:
            self._function = load(config.path)
            return
        if config.path.startswith("__main__:"):
            raise ConfigError.at(
                f"reward function {config.path}",
                "is in the script or notebook that runs, which worker processes do not import. Write it in a file and "
                "name the file: `my_rewards.py:...`; or set `in_process: true`.",
            )
        self._pool = KillablePool(
            f"{__name__}:load",
            config.timeout_s,
            max(4, min(16, num_cores())) if config.workers == "auto" else config.workers,
            argument=config.path,
            import_timeout_s=config.import_timeout_s,
            memory_bytes=round(config.memory_gb * 2**30),
        )
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    async def score(self, answer: Answer) -> float:
        """Return the function's result.

        Raises:
            AttemptFailedError: If the function takes more than `timeout_s` or `memory_gb`, or ends its process.
            DataError: If the row cannot be sent to a worker process.
            Exception: The function's own error, if it is called in this process.
        """
        if self._pool is None:
            return await within(self._config.timeout_s, f"The function {self._config.path}", self._function, answer)
        # Rows and messages may be views of a dataset. Copy them, so that the dataset is not sent.
        messages = tuple(dict(message) for message in answer.messages)
        try:
            return await self._pool.call_async(replace(answer, row=dict(answer.row), messages=messages))
        except TookTooLong:
            raise
        except AttemptFailedError as error:
            if not (hint := missing_reference(answer)):
                raise
            raise AttemptFailedError(f"{str(error).rstrip('.')}. {hint}") from error
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            column = next((name for name, value in answer.row.items() if not _can_be_sent(value)), None)
            if column is None and _can_be_sent(messages):
                raise
            where = "The conversation" if column is None else f"The column '{column}'"
            raise DataError(
                f"{where} cannot be sent to the process that calls the reward function: {type(error).__name__}: "
                f"{error}. Remove or convert it, or set in_process: true in the reward."
            ) from error

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def load(path: str) -> Callable[..., Any]:
    """Return the function that `path` names.

    Raises:
        PluginError: If the function cannot be found.
        ConfigError: If it cannot be called with one argument.
    """
    function = load_function(path, "reward function")
    name = path.rpartition(":")[2]
    signature: inspect.Signature | None = None
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except ValueError:
        # Some functions written in C have no signature. The first call fails if the arguments are wrong.
        pass
    except TypeError:
        problem = (
            f"is of type {type(function).__name__}, not a function"
            if signature is None
            else f"is defined as {name}{signature}, but is called with one argument"
        )
        expected = f"Write `def {name}(answer)`; answer has prompt, response, reference, row and messages."
        raise ConfigError.at(f"reward function {path}", f"{problem}. {expected}") from None
    return function


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return False
    return True
