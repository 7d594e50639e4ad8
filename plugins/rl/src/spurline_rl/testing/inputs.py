"""Make random trajectories for contract tests. The same arguments give the same data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spurline.testing.samples import VOCABULARY
from spurline_rl.trajectory import Trajectory, Turn


def make_trajectories(
    turns: Sequence[Sequence[tuple[int, int]]],
    seed: int = 0,
    *,
    optional_columns: bool = True,
    routed_experts: bool = False,
) -> list[Trajectory]:
    """Return random trajectories.

    Args:
        turns: For each trajectory, the numbers (prompt tokens, response tokens) of each turn.
        optional_columns: Whether turns have the columns that may be None.
        routed_experts: Whether turns also have the indices of 3 experts per token in 2 layers.
    """
    random = np.random.default_rng(seed)
    return [
        Trajectory(
            uid=f"prompt-{number}",
            sample=number % 3,
            turns=tuple(
                _turn(random, prompt, response, optional_columns, routed_experts) for prompt, response in shape
            ),
        )
        for number, shape in enumerate(turns)
    ]


def _turn(
    random: np.random.Generator, prompt: int, response: int, optional_columns: bool, routed_experts: bool
) -> Turn:
    columns: dict[str, Any] = {}
    if optional_columns:
        columns = dict(zip(("logprobs", "rewards"), random.random((2, response), np.float32), strict=True))
        columns["versions"] = random.integers(0, 4, response).astype(np.int32)
        columns["support"] = random.integers(-1, VOCABULARY, (response, 3)).astype(np.int32)
    return Turn(
        prompt_ids=random.integers(1, VOCABULARY, prompt).astype(np.int32),
        response_ids=random.integers(1, VOCABULARY, response).astype(np.int32),
        loss_mask=(random.random(response) < 0.8).astype(np.uint8),
        **columns,
        routed_experts=random.integers(0, 64, (prompt + response, 2, 3)).astype(np.int16) if routed_experts else None,
    )
