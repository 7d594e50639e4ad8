"""Say which optimizer step was not finite, of which model, and which samples it was."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from spurline.builtin.local.microbatches import Rows
from spurline.data.batch import TrainingBatch
from spurline.protocols.backend import Role


def describe_failure(
    role: Role,
    step: int,
    batch: TrainingBatch,
    losses_by_rows: Sequence[tuple[Rows, Tensor]],
    loss: float,
    grad_norm: float,
) -> str:
    """The message of a NonFiniteLossError, which names the micro-batches at fault if their losses show them."""
    broken = [rows for rows, total in losses_by_rows if not math.isfinite(total.item())]
    rows = np.concatenate(broken) if broken else np.arange(batch.num_rows)
    uids = list(dict.fromkeys(batch.segments["uid"].take(rows).values.tolist()))
    shown = ", ".join(str(uid) for uid in uids[:8]) + (f" and {len(uids) - 8} more" if len(uids) > 8 else "")
    whose, rate, warmup = ("", "optimizer.learning_rate", "schedule.warmup_steps")
    if role == "critic":
        whose, rate, warmup = (" of the critic", "critic.optimizer.learning_rate", "critic.warmup_steps")
    return (
        f"Optimizer step {step}{whose}: loss is {loss}, gradient norm is {grad_norm}; the weights are unchanged. "
        f"Samples: {shown}. Lower {rate} or lengthen {warmup} if the loss had been rising; "
        "otherwise look at these samples."
    )
