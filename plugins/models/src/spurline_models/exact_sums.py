"""Sum fp32 tensors so that the result does not depend on the order: any micro-batches and ranks give the same bits.

Each value is split into a multiple of a coarse unit, a multiple of a fine unit, and a rest below half a fine unit that
is dropped. Multiples of one unit add up exactly in float64 while they have at most 53 bits, and exact additions may
be made in any order. Only the total is rounded to fp32. For sums of n values x, the error is at most n * 2^-67 plus one
rounding of the result, while fp32 addition may be wrong by n * 2^-24 * sum |x|.

This is the binned summation with fixed bins of Rump, Ogita and Oishi (2008, doi:10.1137/050645671) and ReproBLAS
(Ahrens, Demmel and Nguyen 2020, doi:10.1145/3389360), which chooses its bins by the largest value. Fixed bins need no
second pass over the data. Kulisch and Miranker (1986, doi:10.1137/1028001) sum exactly in one long fixed-point number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from spurline.errors import RunFailedError
from spurline_models.device_profile import fused_on_gpus

SUM_BYTES = 16
"""Bytes of each value of a sum."""

_COARSE, _FINE = 2.0**-28, 2.0**-66
"""The units of sums."""

_LARGEST_SUM, _MOST_VALUES = 2.0**23, 2**15
"""Within these limits, multiples of either unit add up without rounding."""

_CPU_CHUNK = 1 << 15
"""The number of values that each thread of a CPU splits at once. Temporary values then fit into its cache."""

_SQUARES_COARSE, _SQUARES_FINE, _SQUARES_CHUNK = 2.0**-33, 2.0**-67, 1 << 20
"""The units of sums of squares below 1, and the number of squares whose sum is exact."""


class ExactSum:
    """The sum of fp32 tensors of one shape. It takes `SUM_BYTES` for each value."""

    def __init__(self) -> None:
        self._sums: tuple[Tensor, Tensor] | None = None
        self._largest: Tensor | None = None
        self._count = 0

    def add(self, values: Tensor) -> None:
        """Add a tensor. All tensors must have the same shape and device."""
        flat = values.detach().flatten()
        if self._sums is None:
            zeros = torch.zeros_like(flat, dtype=torch.float64)
            self._sums = zeros, zeros.clone()
        if not len(flat):
            return
        largest = _largest(flat)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self._count += 1
        # Fused operations on a GPU need no temporary values.
        chunk = _CPU_CHUNK * torch.get_num_threads() if flat.device.type == "cpu" else len(flat)
        add = fused_on_gpus(add_multiples, flat.device)
        for parts in zip(*(each.split(chunk) for each in (*self._sums, flat)), strict=True):
            add(*parts)

    def total(self) -> Tensor:
        """Return the sum as an fp32 vector. It is not finite if an added value is not.

        Raises:
            RunFailedError: If the values are so large or so many that sums would not be exact.
        """
        assert self._sums is not None, "nothing was added"
        count, largest = self._count, 0.0 if self._largest is None else float(self._largest)
        if count > _MOST_VALUES or (math.isfinite(largest) and count * largest >= _LARGEST_SUM):
            raise RunFailedError(
                f"backend.sums: reproducible can add up to {_MOST_VALUES:,} gradients whose values are below "
                f"{_LARGEST_SUM:,.0f} divided by their number. An optimizer step has {count:,} gradients with values "
                f"up to {largest:.3g}; the weights are unchanged. Train on fewer sequences at once, lower "
                "optimizer.learning_rate if the loss had been rising, or set sums: fast."
            )
        return self._sums[0].add(self._sums[1]).float()


def add_multiples(coarse: Tensor, fine: Tensor, values: Tensor) -> None:
    """Split values [N] into multiples of both units, and add these to the sums, float64 [N].

    Each step is an addition, so compilers have no product to contract into a fused multiply-add, which would round
    otherwise.
    """
    rest = values.double()
    multiple = _multiple_of(_COARSE, rest)
    coarse += multiple
    rest -= multiple
    fine += _multiple_of(_FINE, rest)


def _multiple_of(unit: float, values: Tensor) -> Tensor:
    """Round float64 values to multiples of the unit. They must be smaller than 2^51 units."""
    # The last bit of a float64 between 2^52 and 2^53 units is worth one unit.
    shift = 1.5 * 2.0**52 * unit
    return (values + shift).sub_(shift)


def sum_of(values: Tensor) -> float:
    """Return the sum of float64 or fp32 values, rounded once. It is NaN if a value is not finite."""
    return math.fsum(values.tolist()) if bool(values.isfinite().all()) else math.nan


def largest_of(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute value, which is infinite if a value is not finite."""
    found = [_largest(tensor) for tensor in tensors if tensor.numel()]
    largest = float(torch.stack(found).amax()) if found else 0.0
    return largest if math.isfinite(largest) else math.inf


def _largest(values: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(values)).abs().amax()


def sum_of_squares(tensors: Iterable[Tensor], largest: float) -> int:
    """Return the sum of squares for `norm_of`. Sums of parts of the tensors add up to exactly the same number.

    `largest` is the largest absolute value of all parts. If it is 0 or not finite, the result is 0.
    """
    if not largest or not math.isfinite(largest):
        return 0
    found = [part for tensor in tensors for part in _sums_of_chunks(tensor.flatten(), _exponent(largest))]
    return sum(int(math.ldexp(value, 67)) for value in (torch.stack(found).tolist() if found else []))


def norm_of(squares: int, largest: float) -> float:
    """Return the norm, given the sum of `sum_of_squares` over all parts."""
    return math.ldexp(math.sqrt(2 * squares), _exponent(largest) - 34) if math.isfinite(largest) else largest


def _exponent(largest: float) -> int:
    return math.frexp(largest)[1]


def _sums_of_chunks(values: Tensor, exponent: int) -> Iterator[Tensor]:
    for part in values.split(_SQUARES_CHUNK):
        # The square of an fp32 value is exact in float64. Scaled by the power of two, it is below 1.
        square = part.double().mul_(2.0**-exponent).square_()
        multiple = _multiple_of(_SQUARES_COARSE, square)
        yield multiple.sum()
        yield _multiple_of(_SQUARES_FINE, square.sub_(multiple)).sum()
