"""Settings of token losses and of the evaluation `loss`. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from spurline.protocols.evaluation import EvaluationConfig
from spurline.protocols.loss import LossConfig


class CrossEntropyConfig(LossConfig):
    """Negative log-likelihood, the usual loss of supervised fine-tuning."""

    is_nll: ClassVar[bool] = True

    name: str = "cross_entropy"


class DynamicFineTuningConfig(LossConfig):
    """Cross-entropy weighted by the token's probability (DFT, Wu et al. 2025, arXiv:2508.05629)."""

    name: str = "dft"


class LossEvaluationConfig(EvaluationConfig):
    """Mean negative log-likelihood of held-out samples, in nats per token, with the metrics of the training loss.

    If a run trains on preference pairs, the evaluation computes the mean of the training loss instead.
    """

    needs_token_loss = True

    name: str = "loss"
    batch_size: int | None = Field(default=None, gt=0)
    """Number of samples in an evaluation batch. If null, it is the training `batch_size`."""
