"""Protocols for losses that read whole distributions of the next token, such as divergences from a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from spurline.protocols.backend import Role

if TYPE_CHECKING:
    from torch import Tensor


class Distribution(Protocol):
    """A model's distributions of the next token at n positions, at the temperature of the objective.

    Ranks may divide the vocabulary. Then the methods are collectives, which all ranks call in the same order.
    """

    @property
    def logprobs(self) -> Tensor:
        """Logprobs [n, V], float32 or float64, of this rank's V tokens, normalised over the whole vocabulary."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """Return the sums [n] of values [n, V] over the whole vocabulary. Gradients flow through them."""
        ...

    def spread(self, sums: Tensor) -> Tensor:
        """Return sums [n] as [n, 1], for a calculation with values [n, V]. Without this, ranks would lose gradients."""
        ...

    def at(self, ids: Tensor) -> Tensor:
        """Return the logprobs [n, k] of tokens int64 [n, k]. Gradients flow through them."""
        ...

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k likeliest tokens, int64 [n, k], the likeliest first, and their logprobs [n, k]."""
        ...


@runtime_checkable
class SaysReadsLogits(Protocol):
    """Settings of a loss that `ReadsLogits`. Plans count their `roles` in the memory of the update."""

    reads_logits: ClassVar[bool]


@runtime_checkable
class ReadsLogits(Protocol):
    """A loss that reads whole distributions. Its config has `reads_logits: ClassVar[bool] = True`.

    reads_logits: roles whose distributions the loss reads beside those of the trained model. It may be empty. The
        `roles` of the loss's config contain them.
    """

    reads_logits: tuple[Role, ...]

    def from_logits(
        self, policy: Distribution, others: Mapping[Role, Distribution], columns: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return values [n] by new names, which `token_loss` and `metrics` find in `inputs.columns`.

        This is called for one chunk of positions at a time, and again in the backward pass, so that the logits of all
        positions never exist together. A position's values may depend on that position alone. All distributions are
        over the tokens that the models share. `others` has no gradient. `columns` has the columns in `needs`, and the
        tokens themselves as `input_ids`.
        """
        ...
