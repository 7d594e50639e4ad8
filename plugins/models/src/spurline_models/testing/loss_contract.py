"""Check that token losses keep their contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PaddedCollator
from spurline.data.configs import PaddedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.loss import Loss, MetricValues, PreparesBatch, TokenLossInputs
from spurline.testing.samples import PAD, make_view
from spurline_models.losses.distributions import ReadsLogits
from spurline_models.streams.token_logprobs import WholeDistribution

PAIR_IDS = "pair_ids"
LABELS = "labels"


class LossContract:
    """A suite of tests for losses. Write a subclass with `make_loss()`. The columns in `needs` are random."""

    def make_loss(self) -> Loss:
        """Return your loss."""
        raise NotImplementedError("subclass LossContract with make_loss(self)")

    def inputs(self, segments: tuple[int, ...] = (3, 5, 2, 4), seed: int = 0) -> TokenLossInputs:
        """Return random float64 inputs. `segments` has the number of loss tokens of each segment.

        Columns that end in `_logprobs` are close to `logprobs`. If the loss needs `pair_ids`, the first two segments
        are a pair, the next two segments are another pair, and so on. `labels` of segments are 1 and -1 in turn.
        """
        generator = torch.Generator().manual_seed(seed)
        drawn: dict[str, Any] = {"size": (sum(segments),), "generator": generator, "dtype": torch.float64}
        needs: Any = self.make_loss().needs
        assert isinstance(needs, frozenset), f"needs is {needs!r}; it must be a frozenset of column names"
        columns = {name: torch.randn(**drawn) for name in sorted(cast("frozenset[str]", needs) - {"entropy"})}
        entropy = torch.rand(**drawn).requires_grad_() if "entropy" in needs else None
        logprobs = -3 * torch.rand(**drawn)
        for name in columns:
            if name.endswith("_logprobs"):
                columns[name] = (logprobs + 0.5 * columns[name]).clamp(max=0)
        segment_index = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments, dtype=torch.int64))
        if PAIR_IDS in columns:
            columns[PAIR_IDS] = (segment_index // 2 + 1) * (1 - 2 * (segment_index % 2))
        if LABELS in columns:
            columns[LABELS] = 1 - 2 * (segment_index % 2)
        if isinstance(made := self.make_loss(), ReadsLogits):
            values = self.values(made, columns, sum(segments))
            columns |= {name: value.detach().requires_grad_() for name, value in values.items()}
        return TokenLossInputs(logprobs.requires_grad_(), segment_index, len(segments), columns, entropy)

    def values(
        self, loss: ReadsLogits, columns: Mapping[str, Tensor], count: int, chunk: slice = slice(None)
    ) -> dict[str, Tensor]:
        """Return what a loss that reads logits makes of random ones at `count` positions, for a chunk of them."""
        drawn: dict[str, Any] = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
        policy, *others = (
            WholeDistribution((3 * torch.randn(count, 12, **drawn)).log_softmax(-1)[chunk])
            for _ in ("policy", *loss.reads_logits)
        )
        given = {name: column[chunk] for name, column in columns.items()}
        given["input_ids"] = (torch.arange(count) % 12)[chunk]
        return dict(loss.from_logits(policy, dict(zip(loss.reads_logits, others, strict=True)), given))

    def test_values_of_logits_depend_on_their_own_position_alone(self) -> None:
        loss, inputs = self.make_loss(), self.inputs()
        if not isinstance(loss, ReadsLogits):
            return
        columns, count = {name: inputs.columns[name] for name in loss.needs - {"entropy"}}, len(inputs.logprobs)
        parts = [self.values(loss, columns, count, chunk) for chunk in (slice(0, 5), slice(5, count))]
        for name, value in self.values(loss, columns, count).items():
            assert value.shape == (count,), name
            torch.testing.assert_close(torch.cat([part[name] for part in parts]), value, rtol=1e-12, atol=1e-12)

    def test_loss_is_one_finite_differentiable_number_per_token(self) -> None:
        inputs = self.inputs()
        loss = self.make_loss().token_loss(inputs)
        assert loss.shape == inputs.logprobs.shape
        assert bool(torch.isfinite(loss).all())
        for gradient in _gradients(loss, inputs).values():
            assert bool(torch.isfinite(gradient).all())

    def test_a_segment_or_pair_alone_has_the_loss_and_metrics_it_has_among_others(self) -> None:
        inputs = self.inputs()
        together = self._values(inputs)
        size = 2 if PAIR_IDS in inputs.columns else 1
        for first in range(0, inputs.num_segments, size):
            (where,) = torch.nonzero(inputs.segment_index // size == first // size, as_tuple=True)
            _assert_equal(self._values(_chosen(inputs, where, first=first)), together, where)

    def test_order_of_segments_does_not_matter(self) -> None:
        inputs = self.inputs()
        order = torch.argsort(inputs.segment_index, descending=True, stable=True)
        _assert_equal(self._values(_chosen(inputs, order)), self._values(inputs), order)

    def test_an_empty_micro_batch_gives_an_empty_loss(self) -> None:
        empty = self.inputs(segments=())
        assert self.make_loss().token_loss(empty).shape == (0,)

    def test_metrics_are_one_finite_number_per_token(self) -> None:
        inputs = self.inputs()
        with torch.no_grad():
            metrics = _flat(self.make_loss().metrics(inputs))
        for name, values in metrics.items():
            assert values.shape == inputs.logprobs.shape, name
            assert bool(torch.isfinite(values).all()), name
            assert not name.endswith(WEIGHTS) or bool((values >= 0).all()), f"{name} are negative"

    def batch(self) -> TrainingBatch:
        """Return the batch that is prepared if the loss is a `PreparesBatch`: six answers and two padding rows.

        The columns that the loss needs are random, and labels are 1 and -1. Override this for other columns.
        """
        batch = PaddedCollator(PaddedCollatorConfig(), PAD, ParallelLayout()).collate(
            make_view((4, 7, 3, 9, 5, 6)), training=True
        )
        made, shape = self.make_loss(), (batch.num_rows, batch.length)
        drawn = {name: -torch.rand(shape, generator=torch.Generator().manual_seed(1)) for name in sorted(made.needs)}
        drawn[LABELS] = torch.tensor([1, -1, 1, 1, -1, 1])[:, None].expand(shape)
        return batch.with_tokens(**drawn).pad_rows(8)

    def test_prepared_columns_belong_to_rows_and_not_to_their_order(self) -> None:
        made, batch = self.make_loss(), self.batch()
        if not isinstance(made, PreparesBatch):
            return
        prepared = made.prepare(batch, _RandomLogprobs(batch))
        shape = (batch.num_rows, batch.length)
        assert made.prepares <= prepared.keys(), f"prepare returned {sorted(prepared)}, not all of `prepares`"
        assert {name: column.shape[:2] for name, column in prepared.items()} == dict.fromkeys(prepared, shape)
        order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(0))
        other = batch.take(order)
        _assert_equal(dict(made.prepare(other, _RandomLogprobs(other))), dict(prepared), order)

    def test_a_loss_made_again_from_its_config_gives_equal_values_and_describes_itself(self) -> None:
        loss = self.make_loss()
        assert len(loss.describe().split()) >= 3
        config = type(loss.config).model_validate(loss.config.model_dump(mode="json"))
        again: Any = type(loss)
        inputs = self.inputs()
        _assert_equal(self._values(inputs, again(config)), self._values(inputs), torch.arange(len(inputs.logprobs)))

    def _values(self, inputs: TokenLossInputs, made: Loss | None = None) -> dict[str, Tensor]:
        made = self.make_loss() if made is None else made
        loss = made.token_loss(inputs)
        gradients = _gradients(loss, inputs)
        with torch.no_grad():
            return {"loss": loss, **gradients, **_flat(made.metrics(inputs))}


def _gradients(loss: Tensor, inputs: TokenLossInputs) -> dict[str, Tensor]:
    """Return the gradients of the logprobs, and of what the loss itself made of logits, if the loss uses them."""
    leaves = {"logprobs": inputs.logprobs, **{name: one for name, one in inputs.columns.items() if one.requires_grad}}
    found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
    gradients = {f"gradient of {name}": one for name, one in zip(leaves, found, strict=True) if one is not None}
    assert gradients, "the loss has no gradient"
    return gradients


WEIGHTS = " (weights)"


def _flat(metrics: Mapping[str, MetricValues]) -> dict[str, Tensor]:
    """Return values by name, and the weights of metrics that have them under names that end in WEIGHTS."""
    found: dict[str, Tensor] = {}
    for name, values in metrics.items():
        found |= {name: values[0], name + WEIGHTS: values[1]} if isinstance(values, tuple) else {name: values}
    return found


class _RandomLogprobs:
    """Logprobs that depend only on a row's tokens and the role."""

    def __init__(self, batch: TrainingBatch) -> None:
        self._batch = batch

    def __call__(self, role: str, rows: Tensor | None = None) -> Tensor:
        batch = self._batch
        found = torch.zeros(batch.num_rows, batch.length)
        for row in torch.arange(batch.num_rows)[slice(None) if rows is None else rows].tolist():
            tokens = batch.tokens["input_ids"][row]
            generator = torch.Generator().manual_seed(int(tokens.sum()) + len(role))
            found[row] = -torch.rand(batch.length, generator=generator) * (batch.tokens["loss_weights"][row] != 0)
        return found


def _chosen(inputs: TokenLossInputs, where: Tensor, first: int = 0) -> TokenLossInputs:
    """Return the inputs at these token positions. The number `first` is subtracted from the segment numbers."""
    segment_index = inputs.segment_index[where] - first
    return TokenLossInputs(
        logprobs=inputs.logprobs.detach()[where].requires_grad_(),
        segment_index=segment_index,
        num_segments=int(segment_index.max()) + 1,
        columns={
            name: column.detach()[where].requires_grad_(column.requires_grad) for name, column in inputs.columns.items()
        },
        entropy=inputs.entropy.detach()[where].requires_grad_() if inputs.entropy is not None else None,
    )


def _assert_equal(chosen: dict[str, Tensor], everything: dict[str, Tensor], where: Tensor) -> None:
    assert chosen.keys() == everything.keys()
    for name, values in chosen.items():
        torch.testing.assert_close(
            values, everything[name][where], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
