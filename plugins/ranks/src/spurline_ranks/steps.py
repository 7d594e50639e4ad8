"""The numbers of an optimizer step that all ranks come to together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

_CLIP_EPSILON = 1e-6
"""The epsilon of torch.nn.utils.clip_grad_norm_, which the local backend uses."""


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks: the gradient norm, and the sum of weight * loss."""

    grad_norm: float
    loss: float

    @classmethod
    def of(cls, squares: Tensor, loss: float) -> StepTotals:
        """Sum over all ranks. A collective.

        Args:
            squares: float64 scalar, the sum of squares of the gradients that this rank counts.
            loss: Sum of weight * loss of the tokens that this rank counts.
        """
        sums = squares.new_tensor([0.0, loss])
        sums[0] = squares
        dist.all_reduce(sums)
        total, loss = sums.tolist()
        return cls(math.sqrt(total), loss)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss)


def clip_factor(grad_norm: float, limit: float | None) -> float | None:
    """Return the factor that brings gradients down to a norm of `limit`; None where they are to stay."""
    return limit / (grad_norm + _CLIP_EPSILON) if limit is not None and grad_norm > limit else None
