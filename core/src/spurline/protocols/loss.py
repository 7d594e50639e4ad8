"""Kind `loss`: a token loss as a pure function of logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from torch import Tensor


ENTROPY = "entropy"
"""Name in `Loss.needs` with which a loss asks for the entropy of the distribution at each position."""


@dataclass(frozen=True)
class TokenLossInputs:
    """Inputs of a loss: the N positions of a micro-batch that carry loss, flattened. Micro-batches do not cut segments.

    logprobs: [N], differentiable, logprob of the token at each position under the model that is trained. For the role
        `critic`, the value that the critic predicts before the token: its estimate of the return from the token on.
    segment_index: int64 [N], number of each position's segment in the micro-batch, from 0.
    num_segments: number of segments in the micro-batch.
    columns: batch columns gathered at those positions, each [N]: `advantages`, `rollout_logprobs`, ...
    entropy: [N], differentiable, or None if the loss does not need it.
    """

    logprobs: Tensor
    segment_index: Tensor
    num_segments: int
    columns: Mapping[str, Tensor]
    entropy: Tensor | None = None


class Loss(Protocol):
    """Loss per token.

    Factory: `Class(config)`. A loss is a pure function of tensors on any device. A token's loss may depend only on its
    own segment, so that gradients do not depend on how the batch is cut. If the loss needs `pair_ids`, it may also
    depend on the other answer of the pair, which has the same unit id.

    needs: inputs that the loss needs in addition to `logprobs`: names of columns, and `entropy`.
    """

    needs: frozenset[str]

    @property
    def config(self) -> LossConfig:
        """Return the settings of the loss. Each process of a backend makes its own loss from them."""
        ...

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        """Return [N] losses. The backend sums weight * loss over the step and divides by the step's normaliser."""
        ...

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """Return [N] values by name, or an empty mapping. This is called under `torch.no_grad`.

        The step reports their weighted mean, or the largest or smallest value if the name ends in `/max` or `/min`.
        """
        ...

    def describe(self) -> str:
        """Return a sentence that describes the objective, for `spurline plan`."""
        ...


@dataclass(frozen=True)
class Objective:
    """The objective of one optimizer step: the sum over tokens of w_t * l_t, divided by `normalizer`.

    loss: the token loss. normalizer: Z, fixed once for the whole optimizer step over all ranks; > 0.
    temperature: divisor of logits before the softmax, so that logprobs and entropy belong to the distribution that
        rollouts were sampled from.
    """

    loss: Loss
    normalizer: float
    temperature: float = 1.0


TrainsOn = Literal["tokens", "advantages", "returns", "pairs"]
"""The data that a loss trains on: plain tokens, advantages of rollouts, returns for a critic, or pairs of answers."""


class LossConfig(ComponentConfig):
    """Settings of a loss."""

    kind: ClassVar[str] = "loss"
    trains_on: ClassVar[TrainsOn] = "tokens"
    """The data that the loss trains on. A source refuses a loss that does not fit its batches."""
    is_nll: ClassVar[bool] = False
    """True if the loss of a token is its negative log-likelihood. Held-out evaluation then needs no other loss."""
    uses_rollout_logprobs: ClassVar[bool] = False
    """True if the loss reads the logprobs with which tokens were sampled. Such a loss needs no `correction` for tokens
    that older weights sampled."""

    @property
    def roles(self) -> frozenset[str]:
        """Return the roles of the untrained models that these settings use, such as `reference`. They take memory."""
        return frozenset()
