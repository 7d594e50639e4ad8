"""Losses and gradients equal those that TRL computes. `make_trl_numbers.py` wrote the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PaddedCollator
from spurline.data.configs import PaddedCollatorConfig
from spurline.data.token_store import TokenStoreBuilder
from spurline.plugins.host import PluginHost
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import PreparesBatch, TokenLossInputs

NUMBERS: dict[str, Any] = json.loads((Path(__file__).parent / "trl_numbers.json").read_text(encoding="utf-8"))
REFERENCE = torch.tensor(NUMBERS["reference"], dtype=torch.float64)
REGISTRY = PluginHost.load([]).registry


def answers_of(case: dict[str, Any]) -> Iterator[tuple[list[int], list[int], dict[str, int]]]:
    """Yield prompt, answer and columns of each answer, mismatched answers last."""
    if case["batch"] != "labelled":
        for number, (prompt, *answers) in enumerate(NUMBERS["batches"][case["batch"]], start=1):
            for answer, sign in zip(answers, (1, -1), strict=True):
                yield prompt, answer, {"pair_ids": sign * number}
        return
    rows = NUMBERS["labelled"]
    yield from ((prompt, answer, {"labels": 1 if is_good else -1}) for prompt, answer, is_good in rows)
    for number, (prompt, _, _) in enumerate(rows):
        yield prompt, rows[number - 1][1], {"labels": 0}


def batch_of(case: dict[str, Any]) -> TrainingBatch:
    builder, marks = TokenStoreBuilder(["answers"]), []
    for row, (prompt, answer, columns) in enumerate(answers_of(case)):
        builder.add(prompt + answer, [0] * len(prompt) + [1] * len(answer), 0, row)
        marks.append(columns)
    store = builder.build()
    collator = PaddedCollator(PaddedCollatorConfig(), 0, ParallelLayout())
    batch = collator.collate(store.view(torch.arange(len(store)).numpy()), training=True)
    (name,) = marks[0]
    column = torch.tensor([mark[name] for mark in marks])[:, None].expand(-1, batch.length)
    return batch.with_tokens(reference_logprobs=logprobs_of(REFERENCE, batch), **{name: column})


def logprobs_of(table: Tensor, batch: TrainingBatch) -> Tensor:
    """Return logprobs [rows, length] of a model that predicts a token from the token before it."""
    ids = batch.tokens["input_ids"].long()
    found = torch.log_softmax(table[ids[:, :-1]], -1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.where(batch.tokens["loss_weights"] != 0, torch.nn.functional.pad(found, (1, 0)), 0.0)


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=lambda case: f"{case['loss']}-{list(case['settings'].values())}")
def test_a_loss_and_its_gradient_are_those_of_trl(case: dict[str, Any]) -> None:
    config = REGISTRY.get("loss", case["loss"]).config.model_validate({"name": case["loss"], **case["settings"]})
    loss, batch = REGISTRY.create("loss", config), batch_of(case)
    table = torch.tensor(NUMBERS["policy"], dtype=torch.float64, requires_grad=True)
    if isinstance(loss, PreparesBatch):

        def found(role: str, rows: Tensor | None = None) -> Tensor:
            assert role == "policy"
            assert rows is not None
            return torch.where(rows[:, None], logprobs_of(table.detach(), batch), 0.0)

        batch = batch.with_tokens(**loss.prepare(batch, found))
        assert float(batch.tokens["kl"].max()) > 0, "a divergence of 0 would show nothing"
    has_loss = batch.tokens["loss_weights"] != 0
    rows = torch.nonzero(has_loss)[:, 0]
    columns = {name: column[has_loss] for name, column in batch.tokens.items()}
    inputs = TokenLossInputs(logprobs_of(table, batch)[has_loss], rows, batch.num_rows, columns)
    # The sources weigh tokens so that each pair, or each labelled answer, counts 1.
    units = columns["pair_ids"].abs() if "pair_ids" in columns else rows
    sizes = torch.bincount(units)
    value = (loss.token_loss(inputs) / sizes[units]).sum() / torch.count_nonzero(sizes)
    (gradient,) = torch.autograd.grad(value, table)
    assert float(value.detach()) == pytest.approx(case["value"], rel=1e-6, abs=1e-6)
    wanted = torch.tensor(case["gradient"], dtype=torch.float64).view_as(table)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)
