"""What an agent returns as reward terms: a number, or several by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spurline.protocols.environment import AttemptFailedError

REWARD = "reward"
"""The term that a single number is."""


def terms_of(value: Any, who: str) -> dict[str, float]:
    """Named finite terms. Raises AttemptFailedError naming `who` for anything else."""
    terms = value if isinstance(value, Mapping) else {REWARD: value}
    if not terms:
        raise AttemptFailedError(f"{who} has returned no reward. Give at least one term.")
    return {str(name): _number(number, str(name), who) for name, number in terms.items()}


def _number(value: Any, name: str, who: str) -> float:
    if not isinstance(value, (int, float, np.number, np.bool_)):
        hint = " Does it lack a return statement?" if value is None else ""
        raise AttemptFailedError(
            f"{who} has returned {value!r:.200} as '{name}'; return a number, or numbers by name.{hint}"
        )
    if not math.isfinite(value):
        raise AttemptFailedError(f"{who} has returned {value} as '{name}'; it must be finite.")
    return float(value)
