"""One batch becomes optimizer steps of the policy, and of the critic if there is one: cut, reduce, update.

Place on the way: TrainingBatch -> mini-batches -> backend -> metrics. This is core's implementation of the `train_step`
hook, the only one; plugins may wrap it. A source with models has written what they say into the batch before, the
factors of a correction too. Only the reference model is asked here, where the loss needs it: sources without a model
build their batches ahead of time, on other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from spurline.data.batch import TrainingBatch
from spurline.plugins.hookspecs import hookimpl
from spurline.protocols.backend import Backend, Role
from spurline.protocols.loss import ENTROPY, Loss, Objective
from spurline.protocols.minibatches import MiniBatches
from spurline.update.reduction import Reduce, reduce_corrected, token_mean

REFERENCE_LOGPROBS = "reference_logprobs"
MADE_IN_UPDATE = frozenset({ENTROPY, REFERENCE_LOGPROBS})
"""Needs of a loss that no batch has to bring: it is computed by the models of an update."""
_SUMMED = ("tokens", "loss_tokens", "time/forward_backward", "time/optimizer")


@dataclass(frozen=True)
class Recipe:
    """How one model is trained on a batch.

    minibatches: cuts the batch into optimizer steps. loss, reduce: what each of them minimises.
    temperature: that at which the batch was sampled; 1 when it was not.
    """

    minibatches: MiniBatches
    loss: Loss
    reduce: Reduce = token_mean
    temperature: float = 1.0


class Update:
    """Hook implementation that trains on one batch.

    stepped: called after each optimizer step with number and role. done: optimizer steps before the first batch, by
    role; what a step takes of them may change over a resume.
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
        """Optimizer steps of the whole run by role."""

    @hookimpl
    def train_step(self, step: int, batch: TrainingBatch) -> Mapping[str, float]:
        """Update the models with every mini-batch of this batch, the critic first.

        The order changes nothing but which metrics are there when the policy's update fails: both learn from columns
        that were computed before either moved.
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
        factors = minibatch.tokens.get("correction_factors")
        if factors is None or role == "critic":
            # Corrections are for the policy's gradient only: returns do not depend on which policy sampled the tokens.
            weighted, normalizer = recipe.reduce(minibatch)
        else:
            weighted, normalizer = reduce_corrected(minibatch, factors, recipe.reduce)
        return self._backend.update(weighted, Objective(recipe.loss, normalizer, recipe.temperature), role=role)


def _name_as_critics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The critic's metrics under names that the policy's do not have; its loss's own have a name before the slash."""
    named: dict[str, float] = {}
    for name, value in metrics.items():
        group, slash, rest = name.partition("/")
        if group == "time":
            named[f"time/critic_{rest}"] = value
        else:
            named[name if slash else f"critic/{name}"] = value
    return named


def _join(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: counts and times add up, `lr` is the last, all else is the mean."""
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(name for part in parts for name in part)
    # A mini-batch without loss tokens has no value for the loss's own metrics.
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
    """Return the batch with the column `reference_logprobs`, if the loss needs it and the source has not put it in."""
    if REFERENCE_LOGPROBS not in loss.needs or REFERENCE_LOGPROBS in batch.tokens:
        return batch
    column = torch.zeros(batch.num_rows, batch.length)
    column[~batch.is_padding_row] = backend.logprobs(batch, role="reference")
    return batch.with_tokens(reference_logprobs=column)
