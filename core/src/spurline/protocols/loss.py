"""Kind `loss`: a token loss as a pure function of logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from torch import Tensor

    from spurline.data.batch import TrainingBatch


ENTROPY = "entropy"
"""Name in `Loss.needs` with which a loss asks for the entropy of the distribution at each position."""

MetricValues: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""Values [N] of a metric, or a pair of values [N] and weights [N], which are not negative."""


@dataclass(frozen=True)
class TokenLossInputs:
    """Inputs of a loss: the N positions of a micro-batch that carry loss, flattened. Micro-batches do not cut segments.

    logprobs: [N], differentiable, logprob of the token at each position under the model that is trained. For the role
        `critic`, the value that the critic predicts before the token: its estimate of the return from the token on.
        With `model.head: score`, the score after the token, so that the last token's is that of the whole text.
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

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, MetricValues]:
        """Return [N] values by name, or an empty mapping. This is called under `torch.no_grad`.

        An optimizer step reports their mean, weighted by the loss weights, or the largest or smallest value if the name
        ends in `/max` or `/min`; a training step, the mean of its optimizer steps. For a metric of some tokens only,
        return values and weights: the loss weights are multiplied by these, and if they sum to 0, the metric is absent.
        """
        ...

    def describe(self) -> str:
        """Return a sentence that describes the objective, for `spurline plan`."""
        ...


class LogprobsOfRows(Protocol):
    """Computes logprobs of a mini-batch."""

    def __call__(self, role: str, rows: Tensor | None = None) -> Tensor:
        """Return the logprobs under the model `role` in these rows (bool [R]; None for all rows), float32 [R, L].

        They are 0 in other rows and at positions without loss. They belong to the weights before the update, and no
        gradient passes through them.
        """
        ...


@runtime_checkable
class PreparesBatch(Protocol):
    """A loss that needs facts of all rows of an optimizer step together, such as a mean over all answers.

    A loss function gets one micro-batch, so it cannot compute such a fact itself without depending on the cut.

    prepares: names of the columns that `prepare` adds. `needs` may name them, and no source has to have them.
    """

    prepares: frozenset[str]

    def prepare(self, batch: TrainingBatch, logprobs: LogprobsOfRows) -> Mapping[str, Tensor]:
        """Return columns [R, L] to add to the batch, or to replace in it.

        This is called with all rows of an optimizer step just before the update, and with each batch of an evaluation.
        `batch` has the other columns of `needs`, and may have padding rows. A replaced `loss_weights` may be 0 in whole
        rows. These rows then only served to compute the columns: they do not count in the reduction, and the model is
        not trained on them.
        """
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


TrainsOn = Literal["tokens", "advantages", "returns", "pairs", "labels"]
"""The data that a loss trains on: plain tokens, advantages of rollouts, returns for a critic, pairs of answers, or
answers with labels, good or bad."""


class LossConfig(ComponentConfig):
    """Settings of a loss."""

    kind: ClassVar[str] = "loss"
    trains_on: ClassVar[TrainsOn] = "tokens"
    """The data that the loss trains on. A source refuses a loss that does not fit its batches."""
    head: ClassVar[Literal["vocabulary", "score"]] = "vocabulary"
    """The head of the model that the loss trains (`model.head`). With `score`, `TokenLossInputs.logprobs` are the
    model's scores at the positions with loss."""
    is_nll: ClassVar[bool] = False
    """True if the loss of a token is its negative log-likelihood. Held-out evaluation then needs no other loss."""
    learns_from_teacher: ClassVar[bool] = False
    """True if another model says what to learn. Such a loss fits rollouts too, and their rewards have no effect."""
    uses_rollout_logprobs: ClassVar[bool] = False
    """True if the loss reads the logprobs with which tokens were sampled. Such a loss needs no `correction` for tokens
    that older weights sampled."""

    @property
    def roles(self) -> frozenset[str]:
        """Return the roles of the untrained models that these settings use, such as `reference`. They take memory."""
        return frozenset()
