"""Log-probabilities of the reference model are computed where a loss needs them and nobody has."""

from __future__ import annotations

from typing import Any, cast

import torch
from backend_batches import lay_out, make_samples
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.losses.configs import CrossEntropyConfig, DpoConfig
from spurline.losses.cross_entropy import CrossEntropy
from spurline.losses.dpo import Dpo
from spurline.protocols.backend import Backend
from spurline.update.update import with_reference_logprobs


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
    batch = lay_out(make_samples([3, 5])).pad_rows(4).take([2, 1, 3, 0])
    complete, roles = asked(batch, Dpo(DpoConfig()))
    assert roles == ["reference"]
    assert complete.tokens["reference_logprobs"][:, 0].tolist() == [0, 5, 0, 3]
    assert torch.equal(complete.is_padding_row, batch.is_padding_row)


def test_nothing_is_computed_for_a_loss_that_needs_none_or_when_the_source_did_it() -> None:
    batch = lay_out(make_samples([3, 5]))
    assert asked(batch, CrossEntropy(CrossEntropyConfig())) == (batch, [])
    brought = batch.with_tokens(reference_logprobs=torch.zeros(2, 5))
    assert asked(brought, Dpo(DpoConfig())) == (brought, [])
