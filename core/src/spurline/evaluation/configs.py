"""Settings of core's evaluations that need no rollouts. Light: imports no torch."""

from __future__ import annotations

from pydantic import Field

from spurline.config.run_config import GenerationEvalConfig
from spurline.protocols.evaluation import EvaluationConfig


class LossEvaluationConfig(EvaluationConfig):
    """Mean negative log-likelihood of held-out samples, in nats per token, with the metrics of the loss that trains;
    of a run that trains on pairs, the mean of its loss."""

    needs_token_loss = True

    name: str = "loss"
    batch_size: int | None = Field(default=None, gt=0)
    """Samples per evaluation batch; default is the training `batch_size`."""


class AnswersEvaluationConfig(EvaluationConfig, GenerationEvalConfig):
    """Greedy answers of the backend to held-out prompts, scored by rewards."""

    generates = True

    name: str = "answers"
