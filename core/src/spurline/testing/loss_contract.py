"""What every token loss must satisfy."""

from __future__ import annotations

import torch
from torch import Tensor

from spurline.protocols.loss import Loss, TokenLossInputs

PAIR_IDS = "pair_ids"


class LossContract:
    """Subclass with `make_loss()`. Columns the loss needs beyond `logprobs` are filled with random numbers."""

    def make_loss(self) -> Loss:
        """Your loss."""
        raise NotImplementedError("subclass LossContract with make_loss(self)")

    def inputs(self, segments: tuple[int, ...] = (3, 5, 2, 4), seed: int = 0) -> TokenLossInputs:
        """Random inputs in float64 with segments of these many loss tokens; logprobs of other models lie nearby.

        For losses that need `pair_ids`, the first and the second segment are a pair, the third and the fourth, ...
        """
        generator = torch.Generator().manual_seed(seed)
        count = sum(segments)
        needs = self.make_loss().needs
        columns = {
            name: torch.randn(count, generator=generator, dtype=torch.float64) for name in sorted(needs - {"entropy"})
        }
        entropy = (
            torch.rand(count, generator=generator, dtype=torch.float64).requires_grad_() if "entropy" in needs else None
        )
        logprobs = -3 * torch.rand(count, generator=generator, dtype=torch.float64)
        for name in columns:
            if name.endswith("_logprobs"):
                columns[name] = (logprobs + 0.5 * columns[name]).clamp(max=0)
        segment_index = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments, dtype=torch.int64))
        if PAIR_IDS in columns:
            columns[PAIR_IDS] = (segment_index // 2 + 1) * (1 - 2 * (segment_index % 2))
        return TokenLossInputs(
            logprobs=logprobs.requires_grad_(),
            segment_index=segment_index,
            num_segments=len(segments),
            columns=columns,
            entropy=entropy,
        )

    def test_loss_is_one_finite_differentiable_number_per_token(self) -> None:
        inputs = self.inputs()
        loss = self.make_loss().token_loss(inputs)
        assert loss.shape == inputs.logprobs.shape
        assert bool(torch.isfinite(loss).all())
        (gradient,) = torch.autograd.grad(loss.sum(), inputs.logprobs)
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
            metrics = self.make_loss().metrics(inputs)
        for name, values in metrics.items():
            assert values.shape == inputs.logprobs.shape, name
            assert bool(torch.isfinite(values).all()), name

    def test_loss_describes_itself_in_a_sentence(self) -> None:
        assert len(self.make_loss().describe().split()) >= 3

    def _values(self, inputs: TokenLossInputs) -> dict[str, Tensor]:
        """Loss, its gradient, and all metrics, each [N]."""
        loss = self.make_loss().token_loss(inputs)
        (gradient,) = torch.autograd.grad(loss.sum(), inputs.logprobs)
        with torch.no_grad():
            return {"loss": loss, "gradient": gradient, **self.make_loss().metrics(inputs)}


def _chosen(inputs: TokenLossInputs, where: Tensor, first: int = 0) -> TokenLossInputs:
    """The tokens at these positions; segments are counted from `first`."""
    segment_index = inputs.segment_index[where] - first
    return TokenLossInputs(
        logprobs=inputs.logprobs.detach()[where].requires_grad_(),
        segment_index=segment_index,
        num_segments=int(segment_index.max()) + 1,
        columns={name: column[where] for name, column in inputs.columns.items()},
        entropy=inputs.entropy.detach()[where].requires_grad_() if inputs.entropy is not None else None,
    )


def _assert_equal(chosen: dict[str, Tensor], everything: dict[str, Tensor], where: Tensor) -> None:
    assert chosen.keys() == everything.keys()
    for name, values in chosen.items():
        torch.testing.assert_close(
            values, everything[name][where], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
