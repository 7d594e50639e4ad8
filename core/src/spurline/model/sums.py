"""Weighted sums over the micro-batches of a step, kept on the device until the step is over.

Place on the way: token losses and loss metrics -> sums -> the step's metrics. One transfer per step, not one per
number.

Say which optimizer step was not finite, of which model, and which samples it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.model.token_stream import Rows, TokenStream
from spurline.protocols.backend import Role

_METRIC, _EXTREME = "metric/", "extreme/"
_EXTREMES = {"max": torch.maximum, "min": torch.minimum}


class StepSums:
    """Sums of weight * value. After `fetch` they can be read."""

    def __init__(self) -> None:
        self.tokens = 0
        self.losses_by_rows: list[tuple[Rows, Tensor]] = []
        self._sums: dict[str, Tensor] = {}
        self._fetched: dict[str, float] = {}

    def add(self, rows: Rows, stream: TokenStream, loss: Tensor, metrics: Mapping[str, Tensor]) -> Tensor:
        """Take in a micro-batch; returns its differentiable sum of weight * loss."""
        total = torch.dot(stream.weights, loss.to(stream.weights.dtype))
        self.tokens += stream.num_loss_tokens
        self.losses_by_rows.append((rows, total.detach()))
        self._add("loss", total.detach())
        self._add("weight", stream.weights.sum())
        for name, values in metrics.items():
            self._add_metric(name, values.detach(), stream.weights)
        return total

    def _add_metric(self, name: str, values: Tensor, weights: Tensor) -> None:
        join = _EXTREMES.get(name.rpartition("/")[2])
        if join is None:
            self._add(f"{_METRIC}{name}", torch.dot(weights, values.to(weights.dtype)))
            return
        extreme = (values.max() if join is torch.maximum else values.min()).double()
        known = self._sums.get(f"{_EXTREME}{name}")
        self._sums[f"{_EXTREME}{name}"] = extreme if known is None else join(known, extreme)

    def _add(self, name: str, value: Tensor) -> None:
        # In double: the last digits of a long sum must not depend on how rows were cut.
        self._sums[name] = self._sums[name] + value.double() if name in self._sums else value.double()

    def fetch(self, *others: Tensor) -> list[float]:
        """Bring all sums to the host, and other scalars with them; returns those."""
        scalars = [*self._sums.values(), *(other.double() for other in others)]
        values: list[float] = torch.stack(scalars).tolist() if scalars else []
        self._fetched = dict(zip(self._sums, values, strict=False))
        return values[len(self._sums) :]

    def total(self, name: str) -> float:
        """Sum of `loss` or `weight`; 0 for a step without loss tokens."""
        return self._fetched.get(name, 0.0)

    def metric_sums(self) -> dict[str, float]:
        """Sums of weight * value of the loss's own metrics, extremes left out."""
        return {name.removeprefix(_METRIC): value for name, value in self._fetched.items() if name.startswith(_METRIC)}

    def metrics(self) -> dict[str, float]:
        """The loss's own metrics: weighted means, and extremes of those named `/max` or `/min`."""
        weight = self.total("weight")
        means = {name: value / weight for name, value in self.metric_sums().items() if weight != 0}
        extremes = {
            name.removeprefix(_EXTREME): value for name, value in self._fetched.items() if name.startswith(_EXTREME)
        }
        return means | extremes


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
