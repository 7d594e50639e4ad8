"""Evaluate the mean negative log-likelihood of held-out tokens. It is comparable between runs with different losses.

The training loss and its metrics are reported too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from spurline.data.batch import TrainingBatch
from spurline.protocols.backend import Backend
from spurline.protocols.dataset import Longest
from spurline.protocols.evaluation import EvaluationContext, MeasuresSamples
from spurline.protocols.loss import Objective, TokenLossInputs
from spurline.protocols.prefetch import Prefetch
from spurline.protocols.source import Samples
from spurline.update.update import with_prepared, with_reference_logprobs
from spurline_models.accumulate import total_by_name
from spurline_models.losses.configs import CrossEntropyConfig, LossEvaluationConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_models.losses.distributions import ReadsLogits
from spurline_text.sources.sft import SampleSet, longest_sample, note_of_shared

_NLL = CrossEntropy(CrossEntropyConfig())


class LossEvaluation(MeasuresSamples):
    """The evaluation `loss`. Samples are read as in training. For preference pairs, it evaluates the run's loss."""

    def __init__(self, config: LossEvaluationConfig, context: EvaluationContext) -> None:
        run = context.run.config
        self._context = context
        self._size = config.batch_size or run.batch_size
        self._trains_as_measured = run.loss.is_nll or run.loss.trains_on != "tokens"
        own = context.source.held_out(config.data)
        self.samples: Samples = SampleSet(config.data, context.run) if own is None else own

    def summary(self) -> Mapping[str, Any]:
        facts, trained = self.samples.summary(), self._context.source.sample_keys()
        shared = [] if trained is None else note_of_shared(self.samples.keys(), trained, self.samples.location)
        return {**facts, "notes": [*facts["notes"], *shared]}

    def longest(self) -> Longest:
        return longest_sample(self.samples)

    def fingerprint(self) -> str:
        return self.samples.fingerprint()

    def metrics(self) -> Collection[str] | None:
        loss = self._context.loss
        if loss.needs or isinstance(loss, ReadsLogits):
            # The loss needs columns of the source, or makes columns of logits, so its metrics are not known yet.
            return None
        nothing = TokenLossInputs(torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1, {}, None)
        return {"loss", *([] if self._trains_as_measured else ["objective"]), *loss.metrics(nothing)}

    def evaluate(self, backend: Backend) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return means over tokens, weighted by their loss weights, and an empty list of rows.

        The means are `loss` and the metrics of the training loss. If `loss` is not the training loss, there is also
        `objective`, the mean of the training loss.
        """
        count, loss = sum(self.samples.sizes()), self._context.loss
        num_batches = math.ceil(count / self._size)

        def build(number: int) -> TrainingBatch:
            numbers = np.arange((number - 1) * self._size, min(number * self._size, count), dtype=np.int64)
            return self.samples.batch(numbers, training=False)

        run = self._context.run
        prefetch: Prefetch = run.host.registry.create(
            "prefetch", run.config.prefetch, build=build, last_step=num_batches
        )
        totals: dict[str, float] = {}
        weights: dict[str, float] = {}
        try:
            prefetch.start(1)
            for number in range(1, num_batches + 1):
                batch = prefetch.next(number)
                complete = with_prepared(with_reference_logprobs(batch, loss, backend), loss, backend)
                sums = backend.evaluate(complete, Objective(loss, normalizer=1.0))
                found = {"loss": sums.loss, "objective": sums.loss, **sums.metrics}
                counted = {**dict.fromkeys(found, sums.weight), **sums.metric_weights}
                if self._trains_as_measured:
                    del found["objective"], counted["objective"]
                else:
                    # A loss may change the weights of its own batch.
                    measured = backend.evaluate(batch, Objective(_NLL, normalizer=1.0))
                    found["loss"], counted["loss"] = measured.loss, measured.weight
                totals, weights = total_by_name([totals, found]), total_by_name([weights, counted])
                batch.release()
        finally:
            prefetch.close()
        return {name: total / weights[name] for name, total in totals.items() if weights[name] != 0}, []
