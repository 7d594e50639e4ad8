"""Order `success_mixture`: parts of the prompts in shares that follow their success, and unsolved prompts once more.

The prompts of a step, a block, are drawn together:

1. Prompts that wait to be drawn again, longest wait first, up to `replay.share` of the block.
2. The rest from the parts. Each part is owed its weight times the rest. What rounding leaves is owed to the next block,
   so the draws of a part never differ from its weights by more than a few prompts, whatever the number of blocks.
3. Within a part, the next prompts of an endless sequence of shuffled passes.

The order remembers all draws, so a position always has the same sample.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.orders.epochs import Indices, permutation
from spurline.errors import DataError
from spurline.protocols.order import SampleFacts
from spurline_curricula.configs import SuccessMixtureConfig
from spurline_curricula.parts import Parts, divide
from spurline_rl.protocols.adaptive_order import ScoredDraw
from spurline_rl.reward_adaptive import DrawnInBlocks

_PASSES = 2**34
"""First of this order's streams of random numbers, one for each part. Streams of other orders have smaller numbers."""
_WITHIN_BLOCKS = _PASSES - 1
"""The stream that shuffles the prompts of a block."""


class SuccessMixtureOrder(DrawnInBlocks):
    """An order that learns from rewards. All its state are arrays, which a checkpoint saves."""

    def __init__(self, config: SuccessMixtureConfig, *, samples: SampleFacts, seed: int) -> None:
        self._config, self._seed = config, seed
        self._parts = Parts.of(samples, config)
        sizes = np.array([len(numbers) for numbers in self._parts.members], np.int64)
        self._sizes = np.where(self._parts.shares > 0, sizes, 0)
        if not self._sizes.sum():
            raise DataError(f"No row can be read, so data.order finds no value of {config.column}.")
        self._part_of = np.full(sum(samples.sizes), -1, np.int64)
        for part, numbers in enumerate(self._parts.members):
            self._part_of[numbers] = part
        super().__init__(min(samples.per_step, int(self._sizes.sum())))
        parts = len(self._sizes)
        self._place = np.zeros(parts, np.int64)
        """Number of prompts of each part that the passes over it have drawn."""
        self._owed = np.zeros(parts)
        """Prompts that each part should have had by its weights, minus those that it had."""
        self._seen = np.zeros(parts, np.int64)
        self._success, self._learnable = np.zeros(parts), np.ones(parts)
        """Means over the last scored prompts of each part. A part without scored prompts counts as learnable."""
        self._waiting: dict[int, None] = {}
        """Prompts to draw again, in the order in which they began to wait."""
        self._times: dict[int, int] = {}
        """How often each unsolved prompt was drawn again."""
        self._counts = {"replayed": 0, "solved": 0, "given_up": 0}
        self._pass = functools.lru_cache(maxsize=2 * parts)(self._shuffled)

    def observe(self, step: int, draws: Sequence[ScoredDraw]) -> None:
        """Update the means of the parts, and choose the prompts to draw again."""
        for draw in draws:
            success = self._config.success_of(draw)
            part = self._part_of[draw.sample]
            self._seen[part] += 1
            rate = 1 / min(self._seen[part], self._config.memory)
            self._success[part] += rate * (success - self._success[part])
            self._learnable[part] += rate * (4 * success * (1 - success) - self._learnable[part])
            self._keep(draw.sample, success)

    def metrics(self) -> Mapping[str, float]:
        """Return the weight and the mean success of each part, and counts of prompts that were drawn again."""
        weights = dict(zip(self._parts.names, self._weights().tolist(), strict=True))
        success = dict(zip(self._parts.names, self._success.tolist(), strict=True))
        found = {f"order/weight/{name}": value for name, value in weights.items()}
        found |= {f"order/success/{name}": value for name, value in success.items()}
        if self._config.replay is not None:
            found |= {f"order/replay/{name}": float(count) for name, count in self._counts.items()}
            found["order/replay/waiting"] = float(len(self._waiting))
        return found

    def state_dict(self) -> dict[str, object]:
        return {
            **super().state_dict(),
            "place": self._place.copy(),
            "owed": self._owed.copy(),
            "seen": self._seen.copy(),
            "success": self._success.copy(),
            "learnable": self._learnable.copy(),
            "waiting": np.array([*self._waiting], np.int64),
            "tried": np.array([*self._times.items()], np.int64).reshape(-1, 2),
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._place, self._seen = (np.array(state[name], np.int64) for name in ("place", "seen"))
        self._owed, self._success, self._learnable = (
            np.array(state[name], np.float64) for name in ("owed", "success", "learnable")
        )
        self._waiting = dict.fromkeys(np.asarray(state["waiting"]).tolist())
        samples, times = np.asarray(state["tried"], np.int64).reshape(-1, 2).T.tolist()
        self._times = dict(zip(samples, times, strict=True))
        self._counts = {name: int(count) for name, count in state["counts"].items()}

    def _weights(self) -> NDArray[np.float64]:
        """Return the part of new prompts that come from each part: float64 [parts], with the sum 1."""
        floor = self._config.floor
        weights = np.where(self._sizes > 0, self._parts.shares, 0) * (floor + (1 - floor) * self._learnable)
        return weights / weights.sum()

    def _draw(self, number: int) -> NDArray[np.int32]:
        again = self._take_waiting()
        chosen = dict.fromkeys(again)
        # A part cannot give more prompts than it has beside those that are drawn again.
        room = self._sizes - np.bincount(self._part_of[again], minlength=len(self._sizes))
        count = min(self._block - len(again), int(room.sum()))
        self._owed += self._weights() * count
        counts = divide(count, self._owed, room)
        # What a part without room is owed does not grow without end.
        self._owed = np.clip(self._owed - counts, -self._block, self._block)
        for part, wanted in enumerate(counts.tolist()):
            chosen |= dict.fromkeys(self._next_of(part, wanted, chosen))
        for sample in chosen:
            self._waiting.pop(sample, None)
        drawn = np.array([*chosen], np.int32)
        assert len(drawn) == self._block, (number, len(drawn), self._block)
        return drawn[permutation(len(drawn), self._seed, number, _WITHIN_BLOCKS)]

    def _next_of(self, part: int, wanted: int, taken: Mapping[int, None]) -> list[int]:
        """Return the next prompts of a part that are not among `taken`, whose turn in the pass is then over."""
        found: dict[int, None] = {}
        size = int(self._sizes[part])
        while len(found) < wanted:
            one_pass, offset = divmod(int(self._place[part]), size)
            self._place[part] += 1
            sample = int(self._pass(part, one_pass)[offset])
            if sample not in taken:
                found[sample] = None
        return [*found]

    def _shuffled(self, part: int, one_pass: int) -> Indices:
        members = self._parts.members[part]
        return members[permutation(len(members), self._seed, one_pass, stream=_PASSES + part)]

    def _keep(self, sample: int, success: float) -> None:
        """Let an unsolved prompt wait, as long as it has not been drawn too often."""
        replay = self._config.replay
        if replay is None:
            return
        times = self._times.get(sample, 0)
        if success >= replay.solved_at:
            self._waiting.pop(sample, None)
            self._counts["solved"] += times > 0
            self._times.pop(sample, None)
        elif times >= replay.most_times:
            self._give_up(sample)
        else:
            self._waiting.setdefault(sample)
            if len(self._waiting) > replay.most_prompts:
                self._give_up(next(iter(self._waiting)))

    def _give_up(self, sample: int) -> None:
        self._waiting.pop(sample, None)
        self._times.pop(sample, None)
        self._counts["given_up"] += 1

    def _take_waiting(self) -> list[int]:
        replay = self._config.replay
        if replay is None:
            return []
        again = [*self._waiting][: int(replay.share * self._block)]
        for sample in again:
            del self._waiting[sample]
            self._times[sample] = self._times.get(sample, 0) + 1
        self._counts["replayed"] += len(again)
        return again
