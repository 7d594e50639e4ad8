"""Log-probabilities of the reference model are computed where a loss needs them and nobody has."""

from __future__ import annotations

from typing import Any, cast

import torch
from bare_components import BesideReference, BesideReferenceConfig, LogLikelihood, LogLikelihoodConfig
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PaddedCollator
from spurline.data.configs import PaddedCollatorConfig
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline.testing.samples import PAD, make_view
from spurline.update.update import with_reference_logprobs


def padded(lengths: list[int]) -> TrainingBatch:
    collator = PaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout())
    return collator.collate(make_view(lengths), training=True)


class CountingBackend:
    """Says for each real row how many tokens it has; counts how often it was asked."""

    def __init__(self) -> None:
        self.roles: list[str] = []

    def logprobs(self, batch: TrainingBatch, role: str = "policy") -> Tensor:
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
