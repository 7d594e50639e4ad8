"""A loss that reads distributions in every way that the protocol has, and the same values from whole logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline_models.losses.distributions import Distribution


class ReadsEverything:
    reads_logits = ("reference",)

    def from_logits(
        self, policy: Distribution, others: Mapping[str, Distribution], columns: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        own, other = policy, others["reference"]
        ids, top = other.top(3)
        return {
            "reverse": own.total(own.logprobs.exp() * (own.logprobs - other.logprobs)),
            "forward": other.total(other.logprobs.exp() * (other.logprobs - own.logprobs)) * columns["scale"],
            "tempered": own.total((own.logprobs / 2 - own.spread(own.total((own.logprobs / 2).exp()).log())) ** 2),
            "top": (top.exp() * own.at(ids)).sum(-1),
            "own": own.at(columns["input_ids"][:, None])[:, 0] ** 2,
        }


def expected_values(own: Tensor, other: Tensor, targets: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The same from whole logits [N, V] of the two models, over the tokens that both have."""
    shared = min(own.shape[1], other.shape[1])
    p, q = own[:, :shared].log_softmax(-1), other[:, :shared].log_softmax(-1)
    likely, ids = q.sort(dim=-1, descending=True)
    return {
        "reverse": (p.exp() * (p - q)).sum(-1),
        "forward": (q.exp() * (q - p)).sum(-1) * scale,
        "tempered": ((p / 2).log_softmax(-1) ** 2).sum(-1),
        "top": (likely[:, :3].exp() * p.gather(-1, ids[:, :3])).sum(-1),
        "own": p.gather(-1, targets[:, None])[:, 0] ** 2,
    }


def total_of(values: Mapping[str, Tensor], logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A scalar with another gradient for every value and position."""
    factors = torch.arange(1, len(logprobs) + 1, dtype=logprobs.dtype)
    parts = [*(values[name] for name in sorted(values)), logprobs, entropy]
    return sum(((number + factors) * part + part**2).sum() for number, part in enumerate(parts))  # type: ignore
