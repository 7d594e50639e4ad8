"""Kind `loss`: a token loss as a pure function of logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from torch import Tensor


ENTROPY = "entropy"
"""Name among a loss's needs of the entropy of the distribution at each position."""


@dataclass(frozen=True)
class TokenLossInputs:
    """Inputs of a loss: the N positions of a micro-batch that carry loss, flattened, whole segments together.

    logprobs: [N], differentiable, of the token at each position under the model being trained. For the role `critic`
        the critic's values there instead: its estimate, from the position before, of the return from that token on.
    segment_index: int64 [N], which segment of the micro-batch each position is in, from 0.
    num_segments: number of segments in the micro-batch.
    columns: batch columns gathered at those positions, each [N]: `advantages`, `rollout_logprobs`, ...
    entropy: [N], differentiable, when the loss asked for it; else None.
    """

    logprobs: Tensor
    segment_index: Tensor
    num_segments: int
    columns: Mapping[str, Tensor]
    entropy: Tensor | None = None


class Loss(Protocol):
    """Loss per token.

    Factory: `Class(config)`. Pure and device-free: tensors in, tensors out, on whatever device they are.
    A token's loss may depend on its own segment only, so that gradients do not depend on how rows were cut; a loss that
    needs `pair_ids` also on the other answer of its pair, which the source keeps in the same unit.

    needs: what must be provided besides `logprobs`: column names, and `entropy`.
    """

    needs: frozenset[str]

    @property
    def config(self) -> LossConfig:
        """Return the settings it was made of; backends of several processes make the loss again from these."""
        ...

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        """[N] losses; the backend sums weight * loss over the step and divides by the step's normaliser."""
        ...

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        """Named [N] values to report over the step; empty when there are none.

        Each becomes its weighted mean; names ending in `/max` or `/min` become the largest or smallest value.
        Called under `torch.no_grad`.
        """
        ...

    def describe(self) -> str:
        """Return the objective in words, one sentence, for `spurline plan`."""
        ...


@dataclass(frozen=True)
class Objective:
    """The objective of one optimizer step: the sum over tokens of w_t * l_t, divided by `normalizer`.

    loss: the token loss. normalizer: Z, fixed once for the whole optimizer step over all ranks; > 0.
    temperature: logits are divided by it before their softmax, so that logprobs and entropy are those of the
        distribution that rollouts were sampled from.
    """

    loss: Loss
    normalizer: float
    temperature: float = 1.0


TrainsOn = Literal["tokens", "advantages", "returns", "pairs"]
"""The tokens as they are; advantages of rollouts; returns, which a critic predicts; or pairs of answers."""


class LossConfig(ComponentConfig):
    """Settings of a loss."""

    kind: ClassVar[str] = "loss"
    trains_on: ClassVar[TrainsOn] = "tokens"
    """The part of a batch that it learns from; a source refuses one that does not fit its batches."""
    is_nll: ClassVar[bool] = False
    """True if its values are negative log-likelihoods of the tokens, so that held-out losses need no other."""
    uses_rollout_logprobs: ClassVar[bool] = False
    """True if the loss itself weighs tokens by the logprobs they were sampled with, so that it needs no `correction`
    where they come from older weights."""

    @property
    def uses_reference(self) -> bool:
        """Return whether its settings need the logprobs of the reference model, which then takes memory."""
        return False
