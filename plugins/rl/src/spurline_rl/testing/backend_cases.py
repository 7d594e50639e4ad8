"""Make the batches of the backend contract, and compare the results of two backends."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PackedCollator, PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Objective
from spurline.testing.samples import PAD, VOCABULARY, make_view
from spurline.update.reduction import token_mean
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_rl.losses.algorithms import ValueLoss
from spurline_rl.losses.configs import ValueLossConfig

GRADIENT_ROUNDINGS = 8
"""Largest difference of a gradient whose terms cancel, in units of eps times the norm of the largest gradient."""

LENGTHS = (5, 17, 9, 30, 3, 12, 8, 21, 14, 6, 11, 2)
TEMPERATURE = 0.7


def assert_gradients_close(got: Any, wanted: Any, tolerance: float, *, cancels_below: float = 0.0) -> None:
    """Assert that each parameter's gradient is close to the expected gradient, relative to the expected norm.

    A gradient is a sum of terms, and each term may be as large as the model's largest gradient. In some gradients the
    terms cancel. For example, the query and key of a token that attends to only one token have no gradient. Such a
    gradient consists of rounding errors alone, so the difference may be as large as the rounding errors.

    Args:
        got: The gradients, as (name, tensor) pairs or as a mapping.
        wanted: The expected gradients, in the same form.
        tolerance: Largest norm of a difference, relative to the norm of the expected gradient.
        cancels_below: A gradient is treated as cancelling if its norm is below this fraction of the largest norm.
            Set it for random batches, in which terms may nearly cancel.
    """
    left, right = dict(got), dict(wanted)
    assert left.keys() == right.keys()
    norms = {name: float(expected.double().norm()) for name, expected in right.items()}
    largest = max(norms.values())
    for name, expected in right.items():
        rounding = GRADIENT_ROUNDINGS * torch.finfo(expected.dtype).eps * largest
        cancels = norms[name] <= max(rounding, cancels_below * largest)
        bound = max(tolerance * norms[name], rounding if cancels else 0.0)
        difference = float((left[name].double() - expected.double()).norm())
        assert difference <= bound, f"gradient of {name}: differs by {difference:.3g}, its norm is {norms[name]:.3g}"


def assert_weights_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that both mappings have the same names and exactly equal tensors."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), f"weight {name} differs"


def weights_of(backend: Backend) -> dict[str, Tensor]:
    """Return a copy of the policy's weights."""
    return copied(backend.named_weights())


def copied(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in weights}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return every tensor in the safetensors files of a folder and its subfolders, by file and name."""
    return {
        f"{path.relative_to(folder)} {name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics except the times, because times differ between equal runs."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@cache
def with_dropout(model: Path, folder: Path, dropout: float) -> Path:
    """Copy the model into a new folder in `folder`, with this attention dropout. If it is 0, return the model's own."""
    if not dropout:
        return model
    copied = Path(tempfile.mkdtemp(dir=folder, prefix="dropout-"))
    shutil.copytree(model, copied, dirs_exist_ok=True)
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    (copied / "config.json").write_text(json.dumps(config | {"attention_dropout": dropout}), encoding="utf-8")
    return copied


UNEVEN = (
    "one row",
    "a long and a short row",
    "one large unit",
    "few rows of alternate units",
    "rows of alternate units",
    "loss in one row",
    "no loss",
)
"""Names of batches that give some ranks little work, or whose rows must be sorted."""


def uneven_batch(name: str, layout: ParallelLayout) -> tuple[TrainingBatch, Objective]:
    """Return the batch with this name from `UNEVEN`, and mean cross-entropy as the objective."""
    # If micro-batches have 40 tokens, a batch from `few` needs one or two micro-batches, and LENGTHS needs several.
    few = {"one row": (17,), "a long and a short row": (58, 3), "few rows of alternate units": (5, 9, 3, 12)}
    lengths = few.get(name, LENGTHS)
    batch, objective = minibatch("padded", layout, 3, lengths)
    rows = torch.arange(batch.num_rows)
    if name == "one large unit":
        batch = replace(batch, unit_ids=torch.where(batch.is_padding_row, rows, 0))
    if name.endswith("alternate units"):
        # The rows of a rank alternate between two units.
        units = 2 * (rows // (batch.num_rows // layout.data)) + rows % 2
        batch = replace(batch, unit_ids=torch.where(batch.is_padding_row, batch.num_rows * 2 + rows, units))
    if name in ("loss in one row", "no loss"):
        kept = rows == 3 if name == "loss in one row" else rows < 0
        batch = batch.with_tokens(loss_weights=batch.tokens["loss_weights"] * kept[:, None])
    batch, normalizer = token_mean(batch)
    return batch, Objective(objective.loss, normalizer)


def minibatch(
    layout_name: str, layout: ParallelLayout, seed: int = 0, lengths: tuple[int, ...] = LENGTHS
) -> tuple[TrainingBatch, Objective]:
    """Return a `packed` or `padded` batch of random samples, and mean cross-entropy as the objective."""
    samples = make_view(lengths, seed)
    collator = (
        PackedCollator(PackedCollatorConfig(max_tokens=64), PAD, layout)
        if layout_name == "packed"
        else PaddedCollator(PaddedCollatorConfig(), PAD, layout)
    )
    batch = collator.collate(samples, training=True)
    batch, normalizer = token_mean(batch)
    return batch, Objective(CrossEntropy(CrossEntropyConfig()), normalizer)


def own_logprobs(model: Any, batch: TrainingBatch, temperature: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each row, except padding rows, the model's logprobs and the loss weights of tokens 1, 2, ..."""
    real = batch.without_padding_rows()
    for row in range(real.num_rows):
        count = int(real.segments["length"][row][0])
        tokens = real.tokens["input_ids"][row : row + 1, :count]
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1] / temperature
        # Log softmax is written out, so that the test does not depend on the library's code.
        logprobs = logits - logits.exp().sum(-1, keepdim=True).log()
        yield logprobs.gather(-1, tokens[0, 1:, None])[:, 0], real.tokens["loss_weights"][row, 1:count]


def with_noisy_columns(batch: TrainingBatch) -> TrainingBatch:
    generator = torch.Generator().manual_seed(5)
    shape = (batch.num_rows, batch.length)
    return batch.with_tokens(
        advantages=torch.randn(shape, generator=generator), old_logprobs=-5 * torch.rand(shape, generator=generator)
    )


def with_support(batch: TrainingBatch) -> TrainingBatch:
    """Return the batch as if each token had been sampled among six tokens or fewer."""
    tokens = batch.tokens["input_ids"].unsqueeze(-1)
    others = torch.randint(-1, VOCABULARY, (*tokens.shape[:2], 5), generator=torch.Generator().manual_seed(6))
    # An id counts once.
    ids = torch.cat([tokens, others], dim=-1).sort(dim=-1).values
    ids[..., 1:][ids[..., 1:] == ids[..., :-1]] = -1
    return batch.with_tokens(support=ids.to(torch.int32))


def values_batch(layout: ParallelLayout, seed: int = 0) -> tuple[TrainingBatch, Objective]:
    """Return a batch with random returns, and the value loss of a critic as the objective."""
    batch, objective = minibatch("packed", layout, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (batch.num_rows, batch.length)
    columns = {"values": torch.zeros(shape), "returns": torch.randn(shape, generator=generator)}
    loss = ValueLoss(ValueLossConfig(clip=None))
    return batch.with_tokens(**columns), Objective(loss, objective.normalizer)


def assert_critics_close(got: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    assert got.keys() == wanted.keys()
    assert got["lr"] == wanted["lr"]
    for name in ("loss", "grad_norm", "value/predicted"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
