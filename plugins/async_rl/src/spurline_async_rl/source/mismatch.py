"""Measure how far the logprobs of trainer and engines differ, by the age of the tokens and by the engine.

Tokens of age 0 were generated with the weights that are trained, so their differences show how precisely trainer and
engine compute. Older tokens also show how far the policy has moved. So an engine is compared with the other engines at
the same ages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from spurline_rl.trajectory import Group, turns_of

_KEPT = 0.75
"""A step counts this many times as much as the next one. In one step, an engine may have few tokens, or easy ones."""
_FEWEST_OWN, _FEWEST_OTHERS = 12, 24
"""An engine is compared if it has this many turns, and the other engines this many, with tokens of the same ages. This
takes 3 responses per step and engine."""
_ROUNDING = 1e-6


class MismatchByEngine:
    """The differences of one run's trained tokens over the last steps."""

    def __init__(self) -> None:
        # The nats, the number of tokens and the number of turns, by engine and age.
        self._sums: dict[tuple[str, int], NDArray[np.float64]] = {}

    def add(self, groups: Sequence[Group], trainer: NDArray[np.float32], updates: int) -> dict[str, float]:
        """Add the tokens of a batch, and return metrics. They are left out if there are too few turns.

        `mismatch/fresh` is the mean difference over the tokens of age 0 of a batch that has older ones too, in nats.
        `mismatch/worst_engine` is the mean difference over the last tokens of the engine that differs most,
        `mismatch/worst_engine/ratio` is this mean divided by that of the other engines at the same ages, and
        `mismatch/worst_engine/number` the number of the engine. Servers have no number.

        Args:
            groups: The groups of the batch.
            trainer: The trainer's logprobs of all response tokens [A], turn after turn.
            updates: The version of the weights that are trained.
        """
        fresh, older = np.zeros(3), np.zeros(3)
        self._sums = {key: _KEPT * sums for key, sums in self._sums.items() if sums[1] >= 1}
        for key, sums in _differences(groups, trainer, updates):
            self._sums[key] = self._sums.get(key, 0.0) + sums
            of_age = older if key[1] else fresh
            of_age += sums
        has_both = fresh[1] > 0 and older[1] > 0
        return {**({"mismatch/fresh": float(fresh[0] / fresh[1])} if has_both else {}), **self._worst()}

    def _worst(self) -> dict[str, float]:
        """Return the metrics of the engine that differs most from the others."""
        of_age: defaultdict[int, NDArray[np.float64]] = defaultdict(lambda: np.zeros(3))
        for (_, age), sums in self._sums.items():
            of_age[age] += sums
        # The sums of the engine, and the nats of the others for as many tokens.
        compared: defaultdict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
        for (engine, age), sums in self._sums.items():
            nats, tokens, turns = of_age[age] - sums
            if engine and turns >= _FEWEST_OTHERS:
                compared[engine] += (*sums, sums[1] * nats / tokens)
        # How many more nats per token an engine has than the others.
        excess = {
            engine: (nats - expected) / tokens
            for engine, (nats, tokens, turns, expected) in compared.items()
            if turns >= _FEWEST_OWN
        }
        if not excess:
            return {}
        worst = max(excess, key=excess.__getitem__)
        nats, tokens, _, expected = compared[worst]
        number = re.match(r"engine (\d+)", worst)
        ratio = nats / max(expected, tokens * _ROUNDING)
        found = {"": nats / tokens, "/ratio": ratio, **({"/number": number[1]} if number else {})}
        return {f"mismatch/worst_engine{end}": float(value) for end, value in found.items()}


def _differences(
    groups: Sequence[Group], trainer: NDArray[np.float32], updates: int
) -> Iterator[tuple[tuple[str, int], NDArray[np.float64]]]:
    """Yield engine and age with the nats and the numbers of trained tokens and turns. Unknown engines have no name."""
    end = 0
    for group in groups:
        columns, counts = group.flat.columns, group.flat.num_response
        begin, end = end, end + int(counts.sum())
        of_trainer = trainer[begin:end]
        if "logprobs" not in columns:
            continue
        distances = np.abs(of_trainer.astype(np.float64) - columns["logprobs"])
        is_trained, ages = columns["loss_mask"] != 0, updates - columns["versions"]
        # If several engines have generated a response, it is unknown which tokens are from which one.
        # An engine that was started again has the same number, and another process in its name.
        alone = (turn.engines[0] if len(turn.engines) == 1 else "" for turn in turns_of([group]))
        names = np.array([name.partition(" (")[0] for name in alone])
        numbers = np.repeat(np.arange(len(counts)), counts)
        for name in np.unique(names).tolist():
            own = (names == name)[numbers] & is_trained
            for age in np.unique(ages[own]).tolist():
                chosen = own & (ages == age)
                num_turns = len(np.unique(numbers[chosen]))
                yield (name, age), np.array([distances[chosen].sum(), np.count_nonzero(chosen), num_turns])
