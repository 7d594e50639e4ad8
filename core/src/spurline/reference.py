"""Give a batch the log-probabilities of the reference model, for losses that compare with it.

Place on the way: TrainingBatch -> this -> mini-batches, or evaluation. Not a source's work: sources without a model
build their batches ahead of time, on other threads.
"""

from __future__ import annotations

import torch

from spurline.data.batch import TrainingBatch
from spurline.protocols.backend import Backend
from spurline.protocols.loss import Loss

REFERENCE_LOGPROBS = "reference_logprobs"


def with_reference_logprobs(batch: TrainingBatch, loss: Loss, backend: Backend) -> TrainingBatch:
    """The batch with the column `reference_logprobs`, if the loss needs it and the source has not put it in."""
    if REFERENCE_LOGPROBS not in loss.needs or REFERENCE_LOGPROBS in batch.tokens:
        return batch
    column = torch.zeros(batch.num_rows, batch.length)
    column[~batch.is_padding_row] = backend.logprobs(batch, role="reference")
    return batch.with_tokens(reference_logprobs=column)
