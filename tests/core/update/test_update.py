"""One batch becomes optimizer steps: what is asked of the backend, and how its answers are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from bare_components import LogLikelihood, LogLikelihoodConfig, Squared, SquaredConfig

from spurline.config.run_config import ReductionConfig
from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PaddedCollator
from spurline.data.configs import PaddedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.testing.samples import PAD, make_view
from spurline.update.reduction import make_reduction
from spurline.update.update import Recipe, Update


class Cut:
    """Mini-batches of these rows."""

    def __init__(self, *rows: list[int]) -> None:
        self._rows = rows

    def steps_per_batch(self) -> int:
        return len(self._rows)

    def cut(self, batch: TrainingBatch) -> Sequence[TrainingBatch]:
        return [batch.take(rows) for rows in self._rows]


class Recording:
    """Answers with given metrics and keeps what it was asked."""

    def __init__(self, answers: list[dict[str, float]]) -> None:
        self._answers = iter(answers)
        self.asked: list[tuple[str, TrainingBatch, Objective]] = []

    def update(self, batch: TrainingBatch, objective: Objective, *, role: str = "policy") -> Mapping[str, float]:
        self.asked.append((role, batch, objective))
        return next(self._answers)


NLL = LogLikelihood(LogLikelihoodConfig())


def three_rows() -> TrainingBatch:
    return PaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout()).collate(make_view([9, 9, 9]), training=True)


def test_minibatches_are_normalised_each_by_itself_and_their_metrics_joined() -> None:
    batch, cut = three_rows(), Cut([0], [1, 2])
    backend: Any = Recording(
        [
            {"loss": 1.0, "lr": 0.1, "tokens": 9.0, "ratio/max": 3.0, "ratio/min": 0.5, "clip": 0.2},
            {"loss": 3.0, "lr": 0.2, "tokens": 18.0, "ratio/max": 2.0, "ratio/min": 0.1},
        ]
    )
    metrics = Update(backend, Recipe(cut, NLL)).train_step(step=1, batch=batch)
    tokens = [part.num_loss_tokens for part in cut.cut(batch)]
    asked = [(role, part.num_rows, objective.normalizer) for role, part, objective in backend.asked]
    assert asked == [("policy", 1, float(tokens[0])), ("policy", 2, float(tokens[1]))]
    joined = {"loss": 2.0, "lr": 0.2, "tokens": 27.0, "ratio/max": 3.0, "ratio/min": 0.1, "clip": 0.2}
    assert {name: metrics[name] for name in joined} == joined
    assert metrics["packing/fill"] == 1.0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ReductionConfig(), None),
        (ReductionConfig(name="sequence_mean"), 3.0),
        (ReductionConfig(name="prompt_mean"), 3.0),
        (ReductionConfig(name="fixed_norm", length=512), 1536.0),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_reduction_of_the_config_sets_the_normaliser(config: ReductionConfig, expected: float | None) -> None:
    batch, backend = three_rows(), Recording([{"lr": 0.1}])
    recipe = Recipe(Cut([0, 1, 2]), NLL, make_reduction(config), temperature=0.7)
    Update(backend, recipe).train_step(step=1, batch=batch)  # type: ignore[arg-type]
    [(_, _, objective)] = backend.asked
    assert objective.normalizer == (expected or batch.num_loss_tokens)
    assert objective.temperature == 0.7


def test_a_correction_rejects_before_the_reduction_counts_and_weighs_after_it() -> None:
    batch, backend = three_rows(), Recording([{"lr": 0.1}, {"lr": 0.1}])
    factors = torch.full_like(batch.tokens["loss_weights"], 1.5)
    factors[1] = 0.0
    corrected = batch.with_tokens(correction_factors=factors)
    Update(backend, Recipe(Cut([0, 1], [1, 2]), NLL)).train_step(step=1, batch=corrected)  # type: ignore[arg-type]
    for (_, part, objective), kept, row in zip(backend.asked, (0, 1), (0, 2), strict=True):
        assert objective.normalizer == float(batch.tokens["loss_weights"][row].sum())
        assert torch.equal(part.tokens["loss_weights"][kept], 1.5 * batch.tokens["loss_weights"][row])
        assert bool((part.tokens["loss_weights"][1 - kept] == 0).all())


def test_a_critic_has_minibatches_and_metrics_of_its_own_and_no_correction() -> None:
    batch = three_rows()
    factors = torch.zeros_like(batch.tokens["loss_weights"])
    answer = {"loss": 1.0, "lr": 0.1, "value/predicted": 0.5, "time/optimizer": 2.0}
    backend: Any = Recording([answer, {**answer, "loss": 3.0, "lr": 0.2}, {"loss": 7.0, "lr": 0.3}])
    critic = Recipe(Cut([0], [1, 2]), Squared(SquaredConfig()))
    update = Update(backend, Recipe(Cut([0, 1, 2]), NLL), critic)
    metrics = update.train_step(step=1, batch=batch.with_tokens(correction_factors=factors))
    assert [role for role, _, _ in backend.asked] == ["critic", "critic", "policy"]
    assert [part.num_loss_tokens > 0 for _, part, _ in backend.asked] == [True, True, False]
    expected = {
        "critic/loss": 2.0,
        "critic/lr": 0.2,
        "value/predicted": 0.5,
        "time/critic_optimizer": 4.0,
        "loss": 7.0,
        "lr": 0.3,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert "time/optimizer" not in metrics


def test_each_optimizer_step_is_told_with_its_number_in_the_whole_run_and_its_role() -> None:
    backend: Any = Recording([{"lr": 0.1}] * 6)
    told: list[tuple[int, str, int]] = []

    def stepped(update: int, role: str) -> None:
        told.append((update, role, len(backend.asked)))

    critic = Recipe(Cut([0, 1, 2]), Squared(SquaredConfig()))
    update = Update(backend, Recipe(Cut([0], [1, 2]), NLL), critic, stepped, {"policy": 6, "critic": 3})
    for step in (4, 5):
        update.train_step(step=step, batch=three_rows())
    assert told == [
        (4, "critic", 1),
        (7, "policy", 2),
        (8, "policy", 3),
        (5, "critic", 4),
        (9, "policy", 5),
        (10, "policy", 6),
    ]
