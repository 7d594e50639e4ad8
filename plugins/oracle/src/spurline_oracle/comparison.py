"""Compare gradients with the truth, within the noise of the dtype that the stack computes in.

The noise is measured: the same batch goes through the same model in the stack's dtype. A parameter may depart by a few
times that noise, since other kernels, layouts and orders of sums round differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from spurline_oracle.truth import Gradients

ALLOWANCE = 5.0
"""How many times the noise a parameter may depart."""

_EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Departure:
    """How far a stack's gradients are from a prediction.

    total: the relative norm of the difference over all parameters. excess: the largest ratio of a parameter's
    difference to what noise allows; at most 1 if the prediction explains the gradients, and infinite if they have NaN
    or infinite values. worst: the parameter with that ratio. error: its relative difference.
    """

    total: float
    excess: float
    worst: str
    error: float


@dataclass(frozen=True)
class Noise:
    """The noise of a dtype.

    absolute: the norm of the error by parameter, relative to the norm of all gradients. overall: the same over all
    parameters. floor: errors below this part of the norm of all gradients are noise.
    """

    absolute: dict[str, float]
    overall: float
    floor: float

    @classmethod
    def measured(cls, truth: Gradients, rounded: Gradients, dtype: str, tf32: bool) -> Noise:
        """Return the noise of gradients that were computed in `dtype` from the truth."""
        epsilon = 2.0**-11 if tf32 and dtype == "float32" else _EPSILONS.get(dtype, _EPSILONS["bfloat16"])
        total = norm(truth)
        # The true gradient of some parameters is zero, such as that of a bias of keys. Then noise is all there is.
        absolute = {
            name: max(float((value - rounded[name]).norm()), epsilon * float(value.norm())) / total
            for name, value in truth.items()
        }
        return cls(absolute, sum(error**2 for error in absolute.values()) ** 0.5, epsilon / 100)


def norm(gradients: Mapping[str, Tensor]) -> float:
    """Return the norm over all parameters."""
    return sum(float(value.norm()) ** 2 for value in gradients.values()) ** 0.5


def scale(gradients: Gradients, prediction: Gradients) -> float:
    """Return the factor by which the prediction must be multiplied to come closest to the gradients."""
    squares = inner_product(gradients, prediction, prediction)
    return inner_product(gradients, gradients, prediction) / max(squares, 1e-300)


def inner_product(names: Iterable[str], one: Gradients, other: Gradients) -> float:
    """Return the sum of the products of all values with these names."""
    return sum(float((one[name] * other[name]).sum()) for name in names)


def compare(gradients: Gradients, prediction: Gradients, noise: Noise, factor: float = 1.0) -> Departure:
    """Return how far gradients are from a prediction that is multiplied by `factor`."""
    total = norm(prediction) * abs(factor)
    worst, error, excess, squares = "none", 0.0, 0.0, 0.0
    for name, value in gradients.items():
        size = float(prediction[name].norm()) * abs(factor)
        difference = float((value - factor * prediction[name]).norm())
        squares += difference**2
        allowed = ALLOWANCE * max(noise.absolute[name] * total, noise.overall * size / 2, noise.floor * total, 1e-300)
        over = difference / allowed if math.isfinite(difference) else float("inf")
        if over > excess:
            worst, error, excess = name, difference / max(size, 1e-300), over
    return Departure(squares**0.5 / max(total, 1e-300), excess, worst, error)
