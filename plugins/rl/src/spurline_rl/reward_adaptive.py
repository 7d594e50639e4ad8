"""Order `reward_adaptive`: draw a prompt more often if some attempts solve it and others do not.

This is sampling for learnability (Foster et al. 2025, arXiv:2502.12272). The weight of a prompt grows with p (1 - p),
where p is the mean reward of its last group. The prompts of a step are drawn together, without replacement. The order
remembers all draws, so a position always has the same sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.orders.epochs import Indices, random_words
from spurline.protocols.order import SampleFacts
from spurline_rl.protocols.adaptive_order import ScoredDraw
from spurline_rl.training_configs import RewardAdaptiveOrderConfig

_DRAWS = 2**33
"""Number of this order's stream of random numbers. Streams of other orders have smaller numbers."""


class DrawnInBlocks(ABC):
    """Base of orders that draw the prompts of a step together, and remember all draws, four bytes each.

    `_draw(number)` returns the next block of `_block` samples, int32. It is called once for each block, in order.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._blocks: list[NDArray[np.int32]] = []

    @abstractmethod
    def _draw(self, number: int) -> NDArray[np.int32]: ...

    def positions(self, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop). A block is drawn when its first position is needed."""
        if start >= stop:
            return np.zeros(0, np.int64)
        first, last = start // self._block, (stop - 1) // self._block
        while len(self._blocks) <= last:
            self._blocks.append(self._draw(len(self._blocks)))
        offset = first * self._block
        return np.concatenate(self._blocks[first : last + 1])[start - offset : stop - offset].astype(np.int64)

    def state_dict(self) -> dict[str, object]:
        drawn = np.concatenate(self._blocks) if self._blocks else np.zeros(0, np.int32)
        return {"block": self._block, "drawn": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._block = int(state["block"])
        self._blocks = list(np.asarray(state["drawn"], np.int32).reshape(-1, self._block))


class RewardAdaptiveOrder(DrawnInBlocks):
    """An order that keeps each prompt's success, which is NaN before its first draw."""

    def __init__(self, config: RewardAdaptiveOrderConfig, *, samples: SampleFacts, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._mixture = np.repeat(np.array(samples.weights, np.float64), samples.sizes)
        self._success: NDArray[np.float64] = np.full(len(self._mixture), np.nan)
        super().__init__(min(samples.per_step, len(self._mixture)))

    def observe(self, step: int, draws: Sequence[ScoredDraw]) -> None:
        """Update the success of these prompts. Raises ConfigError if they have no reward of the configured name."""
        for draw in draws:
            self._success[draw.sample] = self._config.success_of(draw)

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "success": self._success.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._success = np.array(state["success"], np.float64)

    def _draw(self, number: int) -> NDArray[np.int32]:
        """Draw a block of samples without replacement (Efraimidis and Spirakis 2006).

        Each sample gets an exponential random number with its weight as the rate. The smallest numbers are drawn.
        """
        floor = self._config.floor
        learnable = np.where(np.isnan(self._success), 1.0, 4 * self._success * (1 - self._success))
        weights = self._mixture * (floor + (1 - floor) * learnable)
        words = random_words(len(weights), self._seed, number, _DRAWS)
        # The upper 53 bits give numbers above 0 and up to 1.
        keys = -np.log(((words >> np.uint64(11)) + np.uint64(1)) * 2.0**-53) / weights
        chosen = np.argpartition(keys, self._block - 1)[: self._block]
        # From its first draw, a prompt counts as never solved until its rewards are known. They stay unknown if its row
        # is unusable or the prompt is given up.
        self._success[chosen[np.isnan(self._success[chosen])]] = 0.0
        return chosen[np.argsort(keys[chosen], kind="stable")].astype(np.int32)
