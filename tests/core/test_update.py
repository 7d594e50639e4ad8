"""One batch becomes optimizer steps: what is asked of the backend, and how its answers are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spurline.builtin.configs import CrossEntropyConfig, PaddedCollatorConfig
from spurline.builtin.padded_collator import PaddedCollator
from spurline.data.batch import TrainingBatch
from spurline.losses.cross_entropy import CrossEntropy
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.testing.data import PAD, make_view
from spurline.update import Update


class RowByRow:
    def steps_per_batch(self) -> int:
        return 2

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        return [batch.take([0]), batch.take([1, 2])]


class Recording:
    """Answers with given metrics and keeps what it was asked."""

    def __init__(self, answers: list[dict[str, float]]) -> None:
        self._answers = iter(answers)
        self.asked: list[tuple[int, float]] = []

    def update(self, batch: TrainingBatch, objective: Objective) -> Mapping[str, float]:
        self.asked.append((batch.num_rows, objective.normalizer))
        return next(self._answers)


def test_minibatches_are_normalised_each_by_itself_and_their_metrics_joined() -> None:
    batch = PaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout()).collate(make_view([9, 9, 9]), training=True)
    backend: Any = Recording(
        [
            {"loss": 1.0, "lr": 0.1, "tokens": 9.0, "ratio/max": 3.0, "ratio/min": 0.5, "clip": 0.2},
            {"loss": 3.0, "lr": 0.2, "tokens": 18.0, "ratio/max": 2.0, "ratio/min": 0.1},
        ]
    )
    update = Update(backend, RowByRow(), CrossEntropy(CrossEntropyConfig()), "token_mean")
    metrics = update.train_step(step=1, batch=batch)
    tokens = [part.num_loss_tokens for part in RowByRow().cut(batch)]
    assert backend.asked == [(1, float(tokens[0])), (2, float(tokens[1]))]
    joined = {"loss": 2.0, "lr": 0.2, "tokens": 27.0, "ratio/max": 3.0, "ratio/min": 0.1, "clip": 0.2}
    assert {name: metrics[name] for name in joined} == joined
    assert metrics["packing/fill"] == 1.0
