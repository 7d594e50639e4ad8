"""Run a model over the micro-batches of a step: gradients, held-out sums or logprobs, the same for every backend.

Place on the way: token streams -> logprobs -> token losses -> gradients, and sums of losses and metrics. Who cuts rows
into streams, clips and steps is the backend's work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.model.device_profile import DeviceProfile
from spurline.model.stream_model import StreamModel, evaluation_mode
from spurline.model.token_stream import Rows, TokenStream
from spurline.protocols.backend import LossSums, Role
from spurline.protocols.loss import Objective

Streams = Iterable[tuple[Rows, TokenStream]]
"""Micro-batches: the rows of the batch, and those laid out."""


def accumulate_gradients(
    model: StreamModel, streams: Streams, objective: Objective, profile: DeviceProfile
) -> StepSums:
    """Add the gradient of sum(weight * loss) / normalizer over all streams to the parameters; sums not yet fetched."""
    sums = StepSums()
    loss = objective.loss
    for rows, stream in streams:
        with profile.computing():
            inputs = model.loss_inputs(stream, loss.needs, objective.temperature)
            token_loss = loss.token_loss(inputs)
            with torch.no_grad():
                metrics = loss.metrics(inputs)
            total = sums.add(rows, stream, token_loss, metrics)
        (total / objective.normalizer).backward()
    return sums


def evaluation_sums(model: StreamModel, streams: Streams, objective: Objective, profile: DeviceProfile) -> LossSums:
    """Sums in evaluation mode, without gradients; the normalizer is not applied."""
    sums = StepSums()
    loss = objective.loss
    with evaluation_mode(model.causal), profile.computing():
        for rows, stream in streams:
            inputs = model.loss_inputs(stream, loss.needs, objective.temperature)
            sums.add(rows, stream, loss.token_loss(inputs), loss.metrics(inputs))
    sums.fetch()
    return LossSums(sums.total("loss"), sums.total("weight"), sums.tokens, sums.metric_sums())


def logprobs_of(
    model: StreamModel, streams: Streams, batch: TrainingBatch, temperature: float, profile: DeviceProfile
) -> Tensor:
    """Logprobs at the streams' positions with loss, 0 elsewhere: float32 on CPU [rows, length] of the whole batch."""
    result = torch.zeros(batch.num_rows * batch.length)
    positions: list[Tensor] = []
    values: list[Tensor] = []
    with evaluation_mode(model.causal), profile.computing():
        for _, stream in streams:
            positions.append(stream.batch_index)
            values.append(model.loss_inputs(stream, (), temperature).logprobs)
    if values:
        result[torch.cat(positions)] = torch.cat(values).to("cpu", torch.float32)
    return result.view(batch.num_rows, batch.length)


_METRIC, _EXTREME = "metric/", "extreme/"
_EXTREMES = {"max": torch.maximum, "min": torch.minimum}


class StepSums:
    """Weighted sums over micro-batches, kept on the device until `fetch`; one transfer per step, not one per number."""

    def __init__(self) -> None:
        self.tokens = 0
        self._losses_by_rows: list[tuple[Rows, Tensor]] = []
        self._sums: dict[str, Tensor] = {}
        self._fetched: dict[str, float] = {}

    def add(self, rows: Rows, stream: TokenStream, loss: Tensor, metrics: Mapping[str, Tensor]) -> Tensor:
        """Take in a micro-batch; returns its differentiable sum of weight * loss."""
        total = torch.dot(stream.weights, loss.to(stream.weights.dtype))
        self.tokens += stream.num_loss_tokens
        self._losses_by_rows.append((rows, total.detach()))
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

    def broken_rows(self) -> Rows | None:
        """Rows of the micro-batches whose loss is not finite; None when all are."""
        broken = [rows for rows, total in self._losses_by_rows if not math.isfinite(total.item())]
        return np.concatenate(broken) if broken else None


def describe_failure(role: Role, step: int, batch: TrainingBatch, sums: StepSums, loss: float, grad_norm: float) -> str:
    """The message of a NonFiniteLossError: which step of which model, and the samples at fault if their losses show."""
    broken = sums.broken_rows()
    rows = np.arange(batch.num_rows) if broken is None else broken
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
