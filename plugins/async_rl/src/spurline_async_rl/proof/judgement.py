"""Judge from the logprobs of a probe whether an engine generates with the weights that it claims to have.

In: logprobs of the same tokens, by the engine (e), by the trainer with the published weights (n), and by the trainer
with the weights of earlier publishes (p). Out: a Verdict. Pure numpy; no torch, no I/O.

Two measures decide:
- `difference`, the mean of |e - n|. Between an honest engine and the trainer this is rounding, in fp32 about 1e-6.
- `delivered`, the projection of the engine's change on the trainer's, a = (e - p)(n - p) / |n - p|^2, which is 1 for an
  engine with the published weights, and at most about 0 for one that still has the weights of p. In bf16 one update may
  move the logprobs by less than rounding does, so p is also taken from 2, 4, ... publishes before. With d = n - p, and
  rounding of variance s_i^2 at token i, the standard deviation of a is about 2 sqrt(sum s_i^2 d_i^2) / |d|^2. Rounding
  is measured per token, because unlikely tokens have the largest rounding and the largest updates. A projection decides
  only if its standard deviation is small, and d is well above the rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logprobs = NDArray[np.float32]

_LEAST_BAR = 1e-3
"""Mean differences up to this many nats per token are always small enough."""
_USUAL_BAR = 0.05
"""Later differences above this are too large, unless the first one of the run was larger than a third of it."""
_LARGEST_BAR = 0.5
"""A first difference above this is too large: no precision or quantization explains it."""
_HONEST_FACTOR = 10.0
"""In between, a difference may be this many times as large as the first one of the run."""
_LEAST_ROUNDING = 1e-6
_REMEMBERED = 32
"""Number of publishes for which answers and rounding are remembered."""
_SURE = 0.1
"""Largest standard deviation with which a projection decides. It is a fifth of the distance from 1 to the limit."""
_HALF_DELIVERED = 0.5
_ABOVE_ROUNDING = 16.0
"""The update must have this many times the squared length of the rounding."""


@dataclass(frozen=True)
class Verdict:
    """The result of one probe of one engine.

    Attributes:
        difference: Mean |logprob of the engine - logprob of the trainer|, in nats per token.
        delivered: 1 if the engine's weights have changed as the trainer's have, 0 if they have not; None if the change
            does not exceed the rounding.
        fault: The reason why the engine is not believed; empty if it is.
        is_far: Whether the first difference of the run is larger than rounding in bf16 explains.
    """

    difference: float
    delivered: float | None = None
    fault: str = ""
    is_far: bool = False


class Judge:
    """Judges the probes of all engines of a run, publish after publish."""

    def __init__(self) -> None:
        self.bar = _LARGEST_BAR
        """Largest mean difference that is not a fault. The first difference of the run lowers it."""
        self._has_bar = False
        # Squared differences of believed answers, by token.
        self._squares: deque[NDArray[np.float64]] = deque(maxlen=_REMEMBERED)
        # For each version: the trainer's logprobs of each answer, by its tokens.
        self._scored: deque[tuple[int, dict[tuple[int, ...], Logprobs]]] = deque(maxlen=_REMEMBERED + 1)

    def judge(self, version: int, tokens: Sequence[int], given: Logprobs, scored: Logprobs) -> Verdict:
        """Judge the answer of an engine to the probe.

        Args:
            version: The published version.
            tokens: The A tokens of the answer, at least one.
            given: float32 [A], their logprobs by the engine.
            scored: float32 [A], their logprobs by the trainer with the weights of `version`.
        """
        if not self._scored or self._scored[-1][0] != version:
            self._scored.append((version, {}))
        self._scored[-1][1][tuple(tokens)] = scored
        difference = mean_difference(given, scored)
        delivered, is_delivered = self._delivered(tokens, given, scored)
        # NaN is a fault, too.
        if not difference <= self.bar:
            return Verdict(
                difference,
                delivered,
                f"its logprobs differ from the trainer's by {difference:.2g} nats per token, over {self.bar:.2g}",
            )
        if not is_delivered:
            moved = max(0.0, delivered or 0.0)
            return Verdict(difference, delivered, f"its logprobs moved only {moved:.2f} times as far as the trainer's")
        self._squares.append(np.square(given.astype(np.float64) - scored))
        is_far = False
        if not self._has_bar:
            self._has_bar, is_far = True, difference > _USUAL_BAR
            self.bar = max(_LEAST_BAR, min(_USUAL_BAR, _HONEST_FACTOR * difference), 3 * difference)
        return Verdict(difference, delivered, is_far=is_far)

    def _delivered(self, tokens: Sequence[int], given: Logprobs, scored: Logprobs) -> tuple[float | None, bool]:
        """Return `delivered` since the latest version that decides, and whether all versions that decide agree."""
        rounding = self._rounding(len(tokens))
        latest: float | None = None
        back = 1
        while rounding is not None and back < len(self._scored):
            before = _score_of_prefix(self._scored[-1 - back][1], tokens)
            count = len(before)
            update = scored[:count].astype(np.float64) - before
            square, variance = float(update @ update), rounding[:count]
            if square > _ABOVE_ROUNDING * float(variance.sum()):
                deviation = 2 * float(np.sqrt(variance @ np.square(update))) / square
                if deviation <= _SURE:
                    value = float((given[:count].astype(np.float64) - before) @ update) / square
                    latest = value if latest is None else latest
                    if value < _HALF_DELIVERED:
                        return value, False
            back *= 2
        return latest, True

    def _rounding(self, count: int) -> NDArray[np.float64] | None:
        """Return the variance of the rounding at each of the first tokens, or None before the first believed answer."""
        if not self._squares:
            return None
        sums, counts = np.zeros(count), np.zeros(count)
        for squares in self._squares:
            shared = min(count, len(squares))
            sums[:shared] += squares[:shared]
            counts[:shared] += 1
        # A token with few measurements counts as at least as uncertain as the mean of all.
        mean = float(np.concatenate(self._squares).mean())
        return np.maximum((sums + mean) / (counts + 1), max(mean / 4, _LEAST_ROUNDING**2))


def mean_difference(given: Logprobs, scored: Logprobs) -> float:
    """Return the mean of |given - scored|."""
    return float(np.abs(given.astype(np.float64) - scored).mean())


def _score_of_prefix(scored: dict[tuple[int, ...], Logprobs], tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return the earlier logprobs of the first tokens, up to the first token that differs.

    Logprobs depend on the tokens before, so later ones cannot be compared.
    """
    best = np.empty(0)
    for known, values in scored.items():
        shared = min(len(tokens), len(known))
        differs = np.flatnonzero(np.asarray(tokens[:shared]) != np.asarray(known[:shared]))
        count = int(differs[0]) if len(differs) else shared
        if count > len(best):
            best = values[:count].astype(np.float64)
    return best
