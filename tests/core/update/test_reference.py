"""Columns that the update adds: logprobs of the reference model, and what a loss prepares from a whole step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from bare_components import BesideReference, BesideReferenceConfig, LogLikelihood, LogLikelihoodConfig
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PaddedCollator
from spurline.data.configs import PaddedCollatorConfig, WholeBatchConfig
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import LogprobsOfRows, Objective
from spurline.testing.samples import PAD, make_view
from spurline.update.update import Recipe, Update, WholeBatch, columns_from_source, with_reference_logprobs


def padded(lengths: list[int]) -> TrainingBatch:
    collator = PaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout())
    return collator.collate(make_view(lengths), training=True)


class CountingBackend:
    """Says for each real row how many tokens it has; counts how often it was asked."""

    def __init__(self) -> None:
        self.roles: list[str] = []

    def logprobs(self, batch: TrainingBatch, role: str = "policy", *, temperature: float = 1.0) -> Tensor:
        self.roles.append(role)
        tokens = (batch.tokens["segment_ids"] > 0).sum(1, keepdim=True).float().expand(-1, batch.length)
        return batch.drop_padding_rows(tokens)


def asked(batch: TrainingBatch, loss: Any) -> tuple[TrainingBatch, list[str]]:
    backend = CountingBackend()
    return with_reference_logprobs(batch, loss, cast("Backend", backend)), backend.roles


def test_each_row_gets_its_own_values_and_padding_rows_get_none() -> None:
    batch = padded([3, 5]).pad_rows(4).take([2, 1, 3, 0])
    complete, roles = asked(batch, BesideReference(BesideReferenceConfig()))
    assert roles == ["reference"]
    assert complete.tokens["reference_logprobs"][:, 0].tolist() == [0, 5, 0, 3]
    assert torch.equal(complete.is_padding_row, batch.is_padding_row)


def test_nothing_is_computed_for_a_loss_that_needs_none_or_when_the_source_did_it() -> None:
    batch = padded([3, 5])
    assert asked(batch, LogLikelihood(LogLikelihoodConfig())) == (batch, [])
    brought = batch.with_tokens(reference_logprobs=torch.zeros(2, batch.length))
    assert asked(brought, BesideReference(BesideReferenceConfig())) == (brought, [])


class CenteredConfig(LogLikelihoodConfig):
    """The log-likelihood beside its mean over the rows of a step that have label 0."""

    name: str = "centered"


class Centered(LogLikelihood):
    needs = frozenset({"labels", "center", "reference_logprobs"})
    prepares = frozenset({"center"})

    def prepare(self, batch: TrainingBatch, logprobs: LogprobsOfRows) -> Mapping[str, Tensor]:
        others = (batch.tokens["labels"] == 0).all(1) & ~batch.is_padding_row
        found = logprobs("policy", others)
        assert bool((found[~others] == 0).all())
        center = torch.full_like(found, float(found[others, 0].mean()))
        return {"center": center, "loss_weights": torch.where(others[:, None], 0.0, batch.tokens["loss_weights"])}


def test_a_loss_prepares_columns_from_all_rows_of_a_step_and_rows_that_only_served_it_are_not_trained() -> None:
    loss = Centered(CenteredConfig())
    assert columns_from_source(loss) == {"labels"}
    batch = padded([3, 5, 4, 9]).pad_rows(6)
    labels = torch.tensor([0, 1, 0, -1, 0, 0])[:, None].expand(-1, batch.length)
    batch = batch.with_tokens(labels=labels)

    class Trains(CountingBackend):
        def update(self, batch: TrainingBatch, objective: Objective, *, role: str = "policy") -> dict[str, float]:
            self.trained = batch, objective
            return {"lr": 0.1}

    backend: Any = Trains()
    cut = WholeBatch(WholeBatchConfig(), cast(Any, None), ParallelLayout(data=3))
    Update(backend, Recipe(cut, loss)).train_step(step=1, batch=batch)
    assert backend.roles == ["reference", "policy"]
    trained, objective = backend.trained
    assert trained.num_rows == 6, "padding rows take the place of rows that are left out"
    real = trained.without_padding_rows()
    assert real.segments["length"].values.tolist() == [5, 9]
    # Rows 0 and 2 have 3 and 4 tokens.
    assert bool((real.tokens["center"] == 3.5).all())
    assert objective.normalizer == float(batch.tokens["loss_weights"][[1, 3]].sum())
