"""One batch becomes one or several optimizer steps: cut, reduce, update.

Place on the way: TrainingBatch -> mini-batches -> backend -> metrics. This is core's implementation of the `train_step`
hook, the only one; plugins may wrap it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spurline.data.batch import TrainingBatch
from spurline.hookspecs import hookimpl
from spurline.protocols.backend import Backend
from spurline.protocols.loss import Loss, Objective
from spurline.protocols.minibatches import MiniBatches
from spurline.reduction import REDUCTIONS, Reduction

_SUMMED = ("tokens", "loss_tokens", "time/forward_backward", "time/optimizer")


class Update:
    """Hook implementation that trains on one batch."""

    def __init__(self, backend: Backend, minibatches: MiniBatches, loss: Loss, reduction: Reduction) -> None:
        self._backend = backend
        self._minibatches = minibatches
        self._loss = loss
        self._reduce = REDUCTIONS[reduction]

    @hookimpl
    def train_step(self, step: int, batch: TrainingBatch) -> Mapping[str, float]:
        """Update the model with every mini-batch of this batch."""
        parts = [self._update(minibatch) for minibatch in self._minibatches.cut(batch)]
        return {**_join(parts), **batch.info}

    def _update(self, minibatch: TrainingBatch) -> Mapping[str, float]:
        weighted, normalizer = self._reduce(minibatch)
        return self._backend.update(weighted, Objective(self._loss, normalizer))


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
