"""How long things take, as functions of a number: the same number always gives the same value, whatever came before.

Place on the way: given figures, or those of a previous run -> these -> the model. In: the number of a draw or of a
step. Out: seconds, or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_VALUE, _STRAGGLER = 0, 1
"""Streams of random numbers that must not have to do with each other."""


class Distribution(Protocol):
    """A value for each number."""

    @property
    def mean(self) -> float: ...

    def __call__(self, number: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: float

    @property
    def mean(self) -> float:
        return self.value

    def __call__(self, number: int) -> float:
        return self.value


@dataclass(frozen=True)
class LogNormal:
    """Lognormal with this mean; sigma is that of the logarithm, 0 gives a constant."""

    mean: float
    sigma: float
    seed: int = 0

    def __call__(self, number: int) -> float:
        normal = _generator(self.seed, number, _VALUE).standard_normal()
        return self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)


@dataclass(frozen=True)
class Empirical:
    """One of these measured values at random, each as likely as any other."""

    values: Sequence[float]
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.values, "no value to choose from"

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def __call__(self, number: int) -> float:
        return self.values[int(_generator(self.seed, number, _VALUE).integers(len(self.values)))]


@dataclass(frozen=True)
class Stragglers:
    """As `base`, but a `share` of the values is `factor` times as large."""

    base: Distribution
    share: float
    factor: float
    seed: int = 0

    @property
    def mean(self) -> float:
        return self.base.mean * (1 + self.share * (self.factor - 1))

    def __call__(self, number: int) -> float:
        late = _generator(self.seed, number, _STRAGGLER).random() < self.share
        return self.base(number) * (self.factor if late else 1.0)


def _generator(seed: int, number: int, stream: int) -> np.random.Generator:
    return np.random.default_rng((seed, number, stream))
