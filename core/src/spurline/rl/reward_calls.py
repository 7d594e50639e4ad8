"""Call reward components on an answer, and see to it that what they return is a number.

Place on the way: Answer -> rewards by name -> named terms of a trajectory, or scores of an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from spurline.errors import SpurlineError
from spurline.protocols.environment import AttemptFailedError
from spurline.protocols.reward import Answer, Reward, ScoresOnLoop
from spurline.rl.error_text import located
from spurline.rl.thread_calls import in_thread

_SHOWN_CHARACTERS = 200


async def reward_terms(rewards: Mapping[str, Reward], answer: Answer) -> dict[str, float]:
    """The score of each reward. Raises AttemptFailedError naming the reward and the response it failed on."""
    return {name: await _call(name, reward, answer) for name, reward in rewards.items()}


def checked_score(name: str, value: Any, answer: Answer) -> float:
    """The value as a finite float. Raises AttemptFailedError for anything else."""
    number = _number(value)
    if number is None:
        hint = " Does it lack a return statement?" if value is None else ""
        raise AttemptFailedError(
            f"Reward '{name}' returned {_shown(value)} for {_place(answer)}; it must return a number.{hint}"
        )
    if not math.isfinite(number):
        raise AttemptFailedError(f"Reward '{name}' returned {number} for {_place(answer)}; it must be finite.")
    return number


def close_all(components: Mapping[str, Any]) -> None:
    """Close those components that hold something."""
    for component in components.values():
        if hasattr(component, "close"):
            component.close()


async def _call(name: str, reward: Reward, answer: Answer) -> float:
    try:
        # Not isinstance, which takes longer with a Protocol than most rewards do.
        if hasattr(reward, "score_async"):
            value = await cast(ScoresOnLoop, reward).score_async(answer)
        else:
            value = await in_thread(reward.score, answer)
    except AttemptFailedError as error:
        raise AttemptFailedError(f"Reward '{name}' on {_place(answer)}: {error}") from error
    except SpurlineError:
        raise
    except Exception as error:
        raise AttemptFailedError(f"Reward '{name}' failed on {_place(answer)}: {located(error)}") from error
    return checked_score(name, value, answer)


def _number(value: Any) -> float | None:
    """A Python or numpy number, or an array or tensor of no dimension."""
    if not isinstance(value, (int, float, np.number, np.bool_)) and getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, (int, float, np.number, np.bool_)) else None


def _place(answer: Answer) -> str:
    return f"the response {_shown(answer.response)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
