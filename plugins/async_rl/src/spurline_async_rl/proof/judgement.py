"""Judge from the logprobs of a probe whether an engine generates with the weights that it claims to have.

In: logprobs of the same tokens, by the engine (e), by the trainer with the published weights (n), and by the trainer
with the weights of earlier publishes (p). Out: a Verdict. Pure numpy; no torch, no I/O.

Two measures decide:
- `difference`, the mean of |e - n|. Between an honest engine and the trainer this is rounding, in fp32 about 1e-6.
- `delivered`, the projection of the engine's change on the trainer's, a = (e - p)(n - p) / |n - p|^2. It is about 1 for
  an engine with the published weights, and about 0 or less for one that still has the weights of p. In bf16 one update
  may move the logprobs by less than rounding does, so p is also taken from 2, 4, ... publishes before. With d = n - p,
  and rounding of variance s_i^2 at token i, the standard deviation of a is about 2 sqrt(sum s_i^2 d_i^2) / |d|^2.
  Rounding is measured per token, because unlikely tokens have the largest rounding and the largest updates. A
  projection decides only if its standard deviation is small, and d is well above the rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logprobs = NDArray[np.float32]

_FP32_BAR = 1e-3
"""The limit of mean differences, in nats per token, if trainer and engine compute in fp32."""
_USUAL_BAR = 0.05
"""The limit with other precisions, unless three times the measured difference is larger."""
_LARGEST_BAR = 0.5
"""The limit until the difference is measured, and the largest limit. No precision or quantization explains more."""
_FP32_DIFFERENCE = 1e-4
"""If the trainer computes in fp32, a measured mean difference up to this means that the engines do too."""
_UNCERTAIN = -0.1
"""Only tokens with a logprob below this measure the difference: likely tokens have little rounding in any precision."""
_MEASURED_TOKENS = 32
"""Number of uncertain tokens that measure the difference."""
_LEAST_ROUNDING = 1e-6
_REMEMBERED = 32
"""Number of earlier publishes whose logprobs by the trainer are kept, and of answers whose rounding is kept."""
_SURE = 0.1
"""Largest standard deviation with which a projection decides: a fifth of the distance from 1 to `_HALF_DELIVERED`."""
_HALF_DELIVERED = 0.5
_ABOVE_ROUNDING = 16.0
"""A projection decides only if the squared length of the update is more than this many times that of the rounding."""


@dataclass(frozen=True)
class Verdict:
    """The result of one probe of one engine.

    Attributes:
        difference: Mean |logprob of the engine - logprob of the trainer|, in nats per token.
        delivered: About 1 if the engine's weights have changed as the trainer's have, about 0 if they have not; None if
            the change does not exceed the rounding, or if the rounding is not known yet.
        fault: The reason why the engine is not believed; empty if it is believed.
        is_far: Whether this answer completes the measurement of the difference, and the difference is larger than
            rounding in bf16 explains.
    """

    difference: float
    delivered: float | None = None
    fault: str = ""
    is_far: bool = False


class Judge:
    """Judges the probes of all engines of a run, publish after publish.

    `in_fp32` says whether the trainer computes in fp32. If not, a tiny mean difference does not lower the limit to
    `_FP32_BAR`, because in bf16 most differences may be tiny and a few large.
    """

    def __init__(self, *, in_fp32: bool = True) -> None:
        self._in_fp32 = in_fp32
        self.measured_tokens, self.measured_nats = 0, 0.0
        """Uncertain tokens of the first believed answers, and the sum of their differences. A checkpoint keeps them."""
        # Squared differences of believed answers, by token.
        self._squares: deque[NDArray[np.float64]] = deque(maxlen=_REMEMBERED)
        # For each version: the trainer's logprobs of each answer, by its tokens.
        self._scored: deque[tuple[int, dict[tuple[int, ...], Logprobs]]] = deque(maxlen=_REMEMBERED + 1)

    @property
    def bar(self) -> float:
        """Largest mean difference that is not a fault."""
        if self.measured_tokens < _MEASURED_TOKENS:
            return _LARGEST_BAR
        measured = self.measured_nats / self.measured_tokens
        if self._in_fp32 and measured <= _FP32_DIFFERENCE:
            return _FP32_BAR
        return max(_USUAL_BAR, min(3 * measured, _LARGEST_BAR))

    def judge(
        self, version: int, tokens: Sequence[int], given: Logprobs, scored: Logprobs, *, learns: bool = True
    ) -> Verdict:
        """Judge the answer of an engine to the probe.

        Args:
            version: The published version.
            tokens: The A tokens of the answer, at least one.
            given: float32 [A], their logprobs by the engine.
            scored: float32 [A], their logprobs by the trainer with the weights of `version`.
            learns: Whether a believed answer measures the rounding. That of a doubted engine might hide later faults.
        """
        if not self._scored or self._scored[-1][0] != version:
            self._scored.append((version, {}))
        self._scored[-1][1][tuple(tokens)] = scored
        distances = np.abs(given.astype(np.float64) - scored)
        difference = float(distances.mean())
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
        if not learns:
            return Verdict(difference, delivered)
        self._squares.append(np.square(distances))
        is_far = False
        if self.measured_tokens < _MEASURED_TOKENS:
            uncertain = scored < _UNCERTAIN
            self.measured_tokens += int(uncertain.sum())
            self.measured_nats += float(distances[uncertain].sum())
            measured = self.measured_nats / max(1, self.measured_tokens)
            is_far = self.measured_tokens >= _MEASURED_TOKENS and measured > _USUAL_BAR
        return Verdict(difference, delivered, is_far=is_far)

    def _delivered(self, tokens: Sequence[int], given: Logprobs, scored: Logprobs) -> tuple[float | None, bool]:
        """Return `delivered`, measured from the latest version that decides, and True.

        If a version that decides gives less than `_HALF_DELIVERED`, return its value and False.
        """
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
        # Each token gets the mean of all tokens as one more measurement. So a token with few measurements, or with only
        # small ones, does not look exact.
        mean = float(np.concatenate(self._squares).mean())
        return np.maximum((sums + mean) / (counts + 1), max(mean / 4, _LEAST_ROUNDING**2))


def _score_of_prefix(scored: dict[tuple[int, ...], Logprobs], tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return the logprobs in `scored` of the longest beginning of `tokens` that one of its answers shares.

    A logprob depends on all tokens before, so logprobs after the first different token cannot be compared.
    """
    best = np.empty(0)
    for known, values in scored.items():
        shared = min(len(tokens), len(known))
        differs = np.flatnonzero(np.asarray(tokens[:shared]) != np.asarray(known[:shared]))
        count = int(differs[0]) if len(differs) else shared
        if count > len(best):
            best = values[:count].astype(np.float64)
    return best
