"""What every token loss must satisfy."""

from __future__ import annotations

import torch

from spurline.protocols.loss import Loss, TokenLossInputs


class LossContract:
    """Subclass with `make_loss()`. Columns the loss needs beyond `logprobs` are filled with random numbers."""

    def make_loss(self) -> Loss:
        """Your loss."""
        raise NotImplementedError("subclass LossContract with make_loss(self)")

    def inputs(self, segments: tuple[int, ...] = (3, 5, 2), seed: int = 0) -> TokenLossInputs:
        """Random inputs in float64 with segments of these many loss tokens."""
        generator = torch.Generator().manual_seed(seed)
        count = sum(segments)
        needs = self.make_loss().needs
        columns = {
            name: torch.randn(count, generator=generator, dtype=torch.float64) for name in sorted(needs - {"entropy"})
        }
        entropy = (
            torch.rand(count, generator=generator, dtype=torch.float64).requires_grad_() if "entropy" in needs else None
        )
        return TokenLossInputs(
            logprobs=(-3 * torch.rand(count, generator=generator, dtype=torch.float64)).requires_grad_(),
            segment_index=torch.repeat_interleave(
                torch.arange(len(segments)), torch.tensor(segments, dtype=torch.int64)
            ),
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

    def test_a_segment_alone_has_the_loss_it_has_among_others(self) -> None:
        inputs = self.inputs()
        together = self.make_loss().token_loss(inputs)
        for segment in range(inputs.num_segments):
            where = inputs.segment_index == segment
            alone = TokenLossInputs(
                logprobs=inputs.logprobs[where],
                segment_index=torch.zeros(int(where.sum()), dtype=torch.int64),
                num_segments=1,
                columns={name: column[where] for name, column in inputs.columns.items()},
                entropy=inputs.entropy[where] if inputs.entropy is not None else None,
            )
            torch.testing.assert_close(self.make_loss().token_loss(alone), together[where], rtol=1e-12, atol=1e-12)

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
