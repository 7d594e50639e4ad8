"""Train the policy, and the critic if there is one, on one batch: cut it into mini-batches, reduce, and update.

This is core's implementation of the `train_step` hook. Plugins may wrap it, but not replace it. Sources that use
models have already added logprobs, values and correction factors to the batch. Other sources build batches ahead of
time on other threads, where they cannot use the models. For these batches, the update computes the logprobs of the
reference model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.data.batch import TrainingBatch
from spurline.data.configs import WholeBatchConfig
from spurline.plugins.hookspecs import hookimpl
from spurline.protocols.backend import Backend, Role
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import ENTROPY, Loss, Objective, PreparesBatch
from spurline.protocols.minibatches import MiniBatches
from spurline.update.reduction import Reduce, reduce_corrected, token_mean

REFERENCE_LOGPROBS = "reference_logprobs"
_SUMMED = ("tokens", "loss_tokens", "time/forward_backward", "time/optimizer")


@dataclass(frozen=True)
class Recipe:
    """The components and settings that train one model on a batch.

    Attributes:
        minibatches: Cuts the batch into optimizer steps.
        loss: Loss of each optimizer step.
        reduce: Reduction of the token losses.
        temperature: Temperature at which the batch was sampled, or 1 if it was not sampled.
    """

    minibatches: MiniBatches
    loss: Loss
    reduce: Reduce = token_mean
    temperature: float = 1.0


class WholeBatch:
    """Mini-batches `whole`: a batch is one mini-batch, padded to the data-parallel size if the backend needs that."""

    def __init__(self, config: WholeBatchConfig, run: RunConfig, layout: ParallelLayout) -> None:
        self._row_multiple = layout.row_multiple

    def steps_per_batch(self) -> int:
        return 1

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        return [batch.pad_rows(self._row_multiple)]


class Update:
    """Hook implementation that trains on one batch.

    Args:
        backend: Holds the models.
        policy: How the policy is trained.
        critic: How the critic is trained, or None if there is no critic.
        stepped: Called after each optimizer step with its number and role.
        done: Numbers of optimizer steps before the first batch, by role. The number of the training step does not give
            them, since a resume may change how many optimizer steps a training step makes.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Recipe,
        critic: Recipe | None = None,
        stepped: Callable[[int, Role], None] | None = None,
        done: Mapping[Role, int] | None = None,
    ) -> None:
        self._backend = backend
        self._policy = policy
        self._critic = critic
        self._stepped = stepped
        self.done: dict[Role, int] = {"policy": 0, **({} if critic is None else {"critic": 0}), **(done or {})}
        """Number of optimizer steps of the whole run, by role."""

    @hookimpl
    def train_step(self, step: int, batch: TrainingBatch) -> Mapping[str, float]:
        """Update the models with every mini-batch of this batch, the critic first.

        The order does not change results, since both learn from columns that were computed before any update.
        """
        batch = with_reference_logprobs(batch, self._policy.loss, self._backend)
        critic = {} if self._critic is None else _name_as_critics(self._train("critic", self._critic, batch))
        return {**critic, **self._train("policy", self._policy, batch), **batch.info}

    def _train(self, role: Role, recipe: Recipe, batch: TrainingBatch) -> dict[str, float]:
        parts: list[Mapping[str, float]] = []
        for minibatch in recipe.minibatches.cut(batch):
            parts.append(self._update(role, recipe, minibatch))
            self.done[role] += 1
            if self._stepped is not None:
                self._stepped(self.done[role], role)
        return _join(parts)

    def _update(self, role: Role, recipe: Recipe, minibatch: TrainingBatch) -> Mapping[str, float]:
        minibatch = with_prepared(minibatch, recipe.loss, self._backend, recipe.temperature)
        factors = minibatch.tokens.get("correction_factors")
        if factors is None or role == "critic":
            # Corrections are for the policy only, since returns do not depend on the policy that sampled.
            weighted, normalizer = recipe.reduce(minibatch)
        else:
            weighted, normalizer = reduce_corrected(minibatch, factors, recipe.reduce)
        return self._backend.update(weighted, Objective(recipe.loss, normalizer, recipe.temperature), role=role)


def _name_as_critics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the critic's metrics under names that differ from the policy's.

    Metrics of the critic's loss keep their names, which contain a `/`.
    """
    named: dict[str, float] = {}
    for name, value in metrics.items():
        group, slash, rest = name.partition("/")
        if group == "time":
            named[f"time/critic_{rest}"] = value
        else:
            named[name if slash else f"critic/{name}"] = value
    return named


def _join(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of optimizer steps.

    Counts and times are summed. `lr` is the last value. `.../max` is a maximum, `.../min` a minimum. Others are means.
    """
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    # A mini-batch without loss tokens lacks the metrics of the loss.
    values = {name: [part[name] for part in parts if name in part] for name in names}
    joined = {name: _joined(name, found) for name, found in values.items()}
    joined["lr"] = parts[-1]["lr"]
    return joined


def _joined(name: str, values: Sequence[float]) -> float:
    if name in _SUMMED:
        return sum(values)
    if name.endswith("/max"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    return sum(values) / len(values)


def with_reference_logprobs(batch: TrainingBatch, loss: Loss, backend: Backend) -> TrainingBatch:
    """Return the batch with the column `reference_logprobs` if the loss needs it."""
    if REFERENCE_LOGPROBS not in loss.needs or REFERENCE_LOGPROBS in batch.tokens:
        return batch
    return batch.with_tokens(reference_logprobs=_logprobs(batch, backend, 1.0, "reference"))


def with_prepared(batch: TrainingBatch, loss: Loss, backend: Backend, temperature: float = 1.0) -> TrainingBatch:
    """Return the batch with the columns that the loss prepares. Rows that lose all their loss become padding rows."""
    if not isinstance(loss, PreparesBatch):
        return batch
    prepared = batch.with_tokens(**loss.prepare(batch, partial(_logprobs, batch, backend, temperature)))
    had_loss, has_loss = ((each.tokens["loss_weights"] != 0).any(1) for each in (batch, prepared))
    return _only(prepared, ~had_loss | has_loss)


def columns_from_source(loss: Loss) -> frozenset[str]:
    """Return the columns that the batches of a source must have for this loss."""
    prepared = loss.prepares if isinstance(loss, PreparesBatch) else frozenset[str]()
    return loss.needs - {ENTROPY, REFERENCE_LOGPROBS} - prepared


def _logprobs(
    batch: TrainingBatch, backend: Backend, temperature: float, role: Role, rows: Tensor | None = None
) -> Tensor:
    """Return the logprobs of these rows as `LogprobsOfRows` does."""
    column = torch.zeros(batch.num_rows, batch.length)
    chosen = ~batch.is_padding_row if rows is None else rows & ~batch.is_padding_row
    asked = batch if rows is None else _only(batch, chosen)
    column[chosen] = backend.logprobs(asked, role, temperature=temperature)
    return column


def _only(batch: TrainingBatch, rows: Tensor) -> TrainingBatch:
    """Return these rows, and as many padding rows in place of the others, so that the number still suits the ranks."""
    return batch if bool(rows.all()) else batch.take(torch.nonzero(rows).flatten()).pad_rows(batch.num_rows)
