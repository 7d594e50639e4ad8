"""Run a model over the micro-batches of a step, for gradients, evaluation or logprobs, in every backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.protocols.backend import LossSums, Role
from spurline.protocols.loss import MetricValues, Objective, TokenLossInputs
from spurline_models.dealing import Rows
from spurline_models.device_profile import DeviceProfile
from spurline_models.experts.router_replay import ExpertLoads, Loads
from spurline_models.losses.distributions import ReadsLogits
from spurline_models.streams.stream_model import StreamModel, evaluation_mode
from spurline_models.streams.token_logprobs import LogitReading, ReadStates
from spurline_models.streams.token_stream import TokenStream

Streams = Iterable[tuple[Rows, TokenStream]]
"""Micro-batches as pairs: rows of the mini-batch, and the stream of these rows. The model also runs on idle streams,
because other ranks wait for this rank in collectives. No loss is computed on an idle stream."""

Playing = Callable[[Role], AbstractContextManager[StreamModel]]
"""A function that returns a context with the model of a role."""


def accumulate_gradients(
    model: StreamModel,
    streams: Streams,
    objective: Objective,
    profile: DeviceProfile,
    playing: Playing,
    *,
    balance: float | None = None,
) -> StepSums:
    """Add the gradient of sum(weight * loss) / normalizer over all streams to the parameters.

    If `balance` is given, the objective also has this factor times the balance of each sequence (see `StreamBalance`).
    `playing` gives the other models whose logits the loss reads. The returned sums are still on the device. Their sum
    of losses does not include the balance.
    """
    with model.counting_experts() as loads:
        sums = StepSums(loads)
        for rows, stream in streams:
            reading = _reading(stream, objective, profile, playing)
            with profile.computing():
                total = _objective_of(model, rows, stream, objective, sums, balance, reading)
            total.backward()
    return sums


def _reading(
    stream: TokenStream, objective: Objective, profile: DeviceProfile, playing: Playing
) -> LogitReading | None:
    """Return what a loss that reads logits needs of the other models, and None for another loss."""
    loss = objective.loss
    if not isinstance(loss, ReadsLogits):
        return None
    others: dict[Role, ReadStates] = {}
    for role in loss.reads_logits:
        # Without its adapters, the policy itself may play the reference. Its experts are not counted twice.
        # `playing` may load and probe the model, which autocast would disturb.
        with playing(role) as other, profile.computing(), other.counting_experts(), evaluation_mode(other.causal):
            others[role] = ReadStates(other.score, other.states(stream))
    return LogitReading(loss, others)


def _objective_of(
    model: StreamModel,
    rows: Rows,
    stream: TokenStream,
    objective: Objective,
    sums: StepSums,
    balance: float | None,
    reading: LogitReading | None,
) -> Tensor:
    """Return the part of the objective that comes from one micro-batch. It is differentiable."""
    with nullcontext() if balance is None or stream.is_idle else model.balancing(stream) as routed:
        inputs = model.loss_inputs(stream, objective.loss.needs, objective.temperature, reading)
    total = sums.add(rows, stream, inputs, objective) / objective.normalizer
    if balance is None or routed is None:
        return total
    return total + sums.add_balance(routed.total()) * balance


def evaluation_sums(
    model: StreamModel, streams: Streams, objective: Objective, profile: DeviceProfile, playing: Playing
) -> SumsPart:
    """Return the sums over all streams, computed in evaluation mode without gradients, and not normalized."""
    sums = StepSums()
    with evaluation_mode(model.causal):
        for rows, stream in streams:
            reading = _reading(stream, objective, profile, playing)
            with profile.computing():
                inputs = model.loss_inputs(stream, objective.loss.needs, objective.temperature, reading)
            sums.add(rows, stream, inputs, objective)
    return sums.fetch()[0]


def logprobs_of(
    model: StreamModel, streams: Streams, batch: TrainingBatch, temperature: float, profile: DeviceProfile
) -> Tensor:
    """Return logprobs as float32 [rows, length] on CPU. They are 0 at positions without loss."""
    found: list[tuple[Tensor, Tensor]] = []
    with evaluation_mode(model.causal), profile.computing():
        for _, stream in streams:
            logprobs = model.loss_inputs(stream, (), temperature).logprobs
            if not stream.is_idle:
                found.append((stream.batch_index, logprobs))
    return logprob_table(found, batch)


def logprob_table(found: Sequence[tuple[Tensor, Tensor]], batch: TrainingBatch) -> Tensor:
    """Return logprobs as `logprobs_of` does. `found` has the `batch_index` and the logprobs of each stream."""
    result = torch.zeros(batch.num_rows * batch.length)
    if found:
        # All values are copied at once, since each copy waits for the device.
        positions, values = zip(*found, strict=True)
        result[torch.cat(positions)] = torch.cat(values).to("cpu", torch.float32)
    return result.view(batch.num_rows, batch.length)


Number = float | Fraction
"""A sum. Finite sums are fractions, which are exact, so the order of micro-batches and ranks does not matter."""

N = TypeVar("N", float, Number)

_EXTREMES = {"max": (torch.maximum, np.maximum), "min": (torch.minimum, np.minimum)}
"""Functions that join two values of a metric whose name ends with `/max` or `/min`, for tensors and for numbers."""


@dataclass(frozen=True)
class SumsPart:
    """Sums over the micro-batches of one rank, or joined sums of several ranks, as plain data.

    Attributes:
        loss: Sum of weight * loss.
        weight: Sum of weights.
        tokens: Tokens with loss.
        broken_rows: All rows of those micro-batches whose loss is not finite.
        sums: For each other metric of the loss, the sum of weight * value.
        extremes: Values of the loss's metrics whose names end with `/max` or `/min`.
        metric_weights: Sums of the weights of metrics with their own weights. Others have the sum `weight`.
        balance: Sum over sequences of the balance loss of routers, or None without a balance loss.
        expert_loads: This rank's tokens at each expert, by layer. `load_metrics` joins the loads of all ranks.
    """

    loss: Number = 0
    weight: Number = 0
    tokens: int = 0
    broken_rows: tuple[int, ...] = ()
    sums: Mapping[str, Number] = field(default_factory=dict[str, Number])
    extremes: Mapping[str, float] = field(default_factory=dict[str, float])
    metric_weights: Mapping[str, Number] = field(default_factory=dict[str, Number])
    balance: Number | None = None
    expert_loads: Loads = field(default_factory=dict[int, NDArray[np.int64]])

    @classmethod
    def join(cls, parts: Iterable[SumsPart]) -> SumsPart:
        """Add up the sums of all ranks."""
        parts = list(parts)
        extremes: dict[str, float] = {}
        for part in parts:
            for name, value in part.extremes.items():
                join = _EXTREMES[name.rpartition("/")[2]][1]
                extremes[name] = float(join(extremes[name], value)) if name in extremes else value
        balances = [part.balance for part in parts if part.balance is not None]
        return cls(
            loss=sum(part.loss for part in parts),
            weight=sum(part.weight for part in parts),
            tokens=sum(part.tokens for part in parts),
            broken_rows=tuple(row for part in parts for row in part.broken_rows),
            sums=total_by_name(part.sums for part in parts),
            metric_weights=total_by_name(part.metric_weights for part in parts),
            extremes=extremes,
            balance=sum(balances) if balances else None,
        )

    def metrics(self) -> dict[str, float]:
        """Return the loss's own metrics: weighted means, and extremes. A metric whose weights sum to 0 is left out."""
        weights = {name: self.metric_weights.get(name, self.weight) for name in self.sums}
        means = {name: float(value / weights[name]) for name, value in self.sums.items() if weights[name] != 0}
        return {**means, **{name: value for name, value in self.extremes.items() if self.metric_weights.get(name) != 0}}

    def balance_metrics(self, num_sequences: int) -> dict[str, float]:
        """Return `moe/aux_loss`, the mean balance loss of sequences, or {} without a balance loss."""
        return {} if self.balance is None else {"moe/aux_loss": float(self.balance / num_sequences)}

    def as_loss_sums(self) -> LossSums:
        sums, weights = ({name: float(value) for name, value in of.items()} for of in (self.sums, self.metric_weights))
        return LossSums(float(self.loss), float(self.weight), self.tokens, sums, weights)


def total_by_name(sums: Iterable[Mapping[str, N]]) -> dict[str, N]:
    """Add up values of the same name, in the order given."""
    totals: dict[str, N] = {}
    for each in sums:
        for name, value in each.items():
            totals[name] = totals[name] + value if name in totals else value
    return totals


class StepSums:
    """Weighted sums over micro-batches. The values of each micro-batch stay on the device until `fetch`."""

    def __init__(self, expert_loads: ExpertLoads | None = None) -> None:
        self._expert_loads = expert_loads or ExpertLoads()
        self._tokens = 0
        self._rows: list[Rows] = []
        self._totals: dict[str, list[Tensor]] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._metric_weights: dict[str, list[Tensor]] = {}
        self._extremes: dict[str, Tensor] = {}

    def add(self, rows: Rows, stream: TokenStream, inputs: TokenLossInputs, objective: Objective) -> Tensor:
        """Add a micro-batch, and return its differentiable sum of weight * loss."""
        if stream.is_idle:
            # Every parameter gets a gradient of zeros, in the same order as on the other ranks.
            return (inputs.logprobs * 0).sum()
        loss = objective.loss.token_loss(inputs)
        with torch.no_grad():
            for name, values in objective.loss.metrics(inputs).items():
                self._add_metric(name, values, stream.weights)
        total = torch.dot(stream.weights, loss.to(stream.weights.dtype))
        self._tokens += stream.num_loss_tokens
        self._rows.append(rows)
        _add(self._totals, "loss", total.detach())
        _add(self._totals, "weight", stream.weights.double().sum())
        return total

    def add_balance(self, balance: Tensor) -> Tensor:
        """Add the balance loss of a micro-batch's sequences, and return it."""
        _add(self._totals, "balance", balance.detach())
        return balance

    def _add_metric(self, name: str, values: MetricValues, weights: Tensor) -> None:
        ending = name.rpartition("/")[2]
        if isinstance(values, tuple):
            values, own_weights = values
            # Values without weight may be infinite or NaN.
            values = torch.where(own_weights != 0, values, {"max": -math.inf, "min": math.inf}.get(ending, 0.0))
            weights = weights * own_weights.to(weights.dtype)
            _add(self._metric_weights, name, weights.sum())
        if ending not in _EXTREMES:
            _add(self._sums, name, torch.dot(weights, values.to(weights.dtype)))
            return
        join = _EXTREMES[ending][0]
        extreme = (values.max() if ending == "max" else values.min()).double()
        self._extremes[name] = join(self._extremes[name], extreme) if name in self._extremes else extreme

    def fetch(self, *others: Tensor) -> tuple[SumsPart, list[float]]:
        """Return all sums, and the values of other scalar tensors, with one transfer to the host."""
        summed = (self._totals, self._sums, self._metric_weights)
        scalars = [value for group in summed for values in group.values() for value in values]
        scalars += [*self._extremes.values(), *(other.double() for other in others)]
        fetched = iter(torch.stack(scalars).tolist() if scalars else [])
        values = [{name: [next(fetched) for _ in each] for name, each in group.items()} for group in summed]
        totals, sums, metric_weights = ({name: _total(each) for name, each in group.items()} for group in values)
        losses = values[0].get("loss", [])
        broken = [rows for rows, loss in zip(self._rows, losses, strict=True) if not math.isfinite(loss)]
        part = SumsPart(
            loss=totals.get("loss", 0),
            weight=totals.get("weight", 0),
            tokens=self._tokens,
            broken_rows=tuple(row for rows in broken for row in rows.tolist()),
            sums=sums,
            metric_weights=metric_weights,
            extremes={name: next(fetched) for name in self._extremes},
            balance=totals.get("balance"),
            expert_loads=self._expert_loads.fetch(),
        )
        return part, list(fetched)


def _add(sums: dict[str, list[Tensor]], name: str, value: Tensor) -> None:
    sums.setdefault(name, []).append(value.double())


def _total(values: Sequence[float]) -> Number:
    # Fractions cannot be infinite or NaN.
    return sum(map(Fraction, values)) if all(map(math.isfinite, values)) else sum(values)


def describe_failure(role: Role, step: int, batch: TrainingBatch, sums: SumsPart, loss: float, grad_norm: float) -> str:
    """Return the message of a NonFiniteLossError. It names samples of broken rows, or of all rows if none is broken."""
    rows = np.asarray(sums.broken_rows, np.int64) if sums.broken_rows else np.arange(batch.num_rows)
    uids = list(dict.fromkeys(batch.segments["uid"].take(rows).values.tolist()))
    shown = ", ".join(str(uid) for uid in uids[:8]) + (f" and {len(uids) - 8} more" if len(uids) > 8 else "")
    whose, fix = "", "Lower optimizer.learning_rate or lengthen schedule.warmup_steps"
    if role == "critic":
        whose, fix = " of the critic", "Lower critic.optimizer.learning_rate or lengthen critic.warmup_steps"
    return (
        f"Optimizer step {step}{whose}: loss is {loss}, gradient norm is {grad_norm}; the weights are "
        f"unchanged. Samples: {shown}. {fix} if the loss had been rising; otherwise look at these samples."
    )
