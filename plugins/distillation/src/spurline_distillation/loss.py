"""Distillation: the divergence between a teacher's distribution P and the trained model's Q, at each token.

    forward_kl       KL(P || Q) = sum_v P(v) (log P(v) - log Q(v))          Hinton et al. 2015, arXiv:1503.02531
    reverse_kl       KL(Q || P)                                              MiniLLM, Gu et al. 2023, arXiv:2306.08543
    jensen_shannon   beta KL(P || M) + (1 - beta) KL(Q || M),  M = beta P + (1 - beta) Q
                                                                             GKD, Agarwal et al. 2023, arXiv:2306.13649

Both distributions are at the temperature of the objective, and then at the loss's own `temperature`: P(v)^(1/T),
normalised. The loss is not multiplied by T^2. With top_k the events are the teacher's k likeliest tokens, and one event
for all others together, as in SDPO (Huebotter et al. 2026, arXiv:2601.20802). If the k tokens were renormalised
instead, nothing would hold down the probability of all others (TA-OPD, 2026, arXiv:2608.14728). The divergence of the
events is at most that of the tokens, and is 0 only if P and Q agree on all of the events.

The tokens may be anyone's: those of the data (the teacher's own answers are usual) or of rollouts (on-policy).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spurline.protocols.loss import TokenLossInputs
from spurline_distillation.configs import TOP_IDS, TOP_LOGPROBS, DistillationConfig
from spurline_models.losses.distributions import Distribution

DIVERGENCE = "distillation/divergence"
_IMPOSSIBLE = -1e4
"""A log-probability of an event without a probability. It is finite, so that their product is 0."""
_RAREST = 1e-7
"""Smallest probability of the tokens outside of the top k, below which fp32 cannot tell it from 0."""


class Distillation:
    """The loss `distillation`."""

    def __init__(self, config: DistillationConfig) -> None:
        self.config = config
        self._teachers = config.weighted_teachers
        self.needs = frozenset(name for name in self._teachers if name is not None)
        self.reads_logits = tuple(dict.fromkeys(self._teachers.values()))
        if config.served:
            self.needs, self.reads_logits = frozenset({TOP_IDS, TOP_LOGPROBS}), ()

    def from_logits(
        self, policy: Distribution, others: Mapping[str, Distribution], columns: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if self.config.served:
            ids, top = columns[TOP_IDS].long(), columns[TOP_LOGPROBS]
            # A served teacher may have tokens that the trained model lacks. They count as all others.
            is_unknown = ids >= policy.total(torch.ones_like(policy.logprobs)).unsqueeze(-1)
            own = policy.at(ids.masked_fill(is_unknown, 0))
            p, q = (_with_rest(values.masked_fill(is_unknown, _IMPOSSIBLE)) for values in (top, own))
            return {DIVERGENCE: self._terms(p, q).sum(-1)}
        found = 0.0
        for column, role in self._teachers.items():
            divergence = self._divergence(others[role], policy)
            found = found + (divergence if column is None else columns[column] * divergence)
        assert isinstance(found, Tensor)
        return {DIVERGENCE: found}

    def _divergence(self, teacher: Distribution, student: Distribution) -> Tensor:
        temperature = self.config.temperature
        sums = [_log_norm(each, temperature) for each in (teacher, student)]
        if self.config.top_k is None:
            p, q = (
                each.logprobs if by is None else each.logprobs / temperature - each.spread(by)
                for each, by in zip((teacher, student), sums, strict=True)
            )
            return student.total(self._terms(p, q))
        ids, top = teacher.top(self.config.top_k)
        p, q = (
            _with_rest(values if by is None else values / temperature - by.unsqueeze(-1))
            for values, by in zip((top, student.at(ids)), sums, strict=True)
        )
        return self._terms(p, q).sum(-1)

    def _terms(self, p: Tensor, q: Tensor) -> Tensor:
        """Return the terms of the divergence, whose sum over all events it is. p, q: log-probabilities [n, events]."""
        if self.config.divergence == "forward_kl":
            return p.exp() * (p - q)
        if self.config.divergence == "reverse_kl":
            return q.exp() * (q - p)
        beta = torch.tensor(self.config.beta, dtype=p.dtype, device=p.device)
        mixture = torch.logaddexp(p + beta.log(), q + torch.log1p(-beta))
        return beta * p.exp() * (p - mixture) + (1 - beta) * q.exp() * (q - mixture)

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        return inputs.columns[DIVERGENCE] - self.config.cross_entropy * inputs.logprobs

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, Tensor]:
        return {DIVERGENCE: inputs.columns[DIVERGENCE], "distillation/cross_entropy": -inputs.logprobs}

    def describe(self) -> str:
        config = self.config
        kinds = {
            "forward_kl": "KL divergence of the trained model from the teacher",
            "reverse_kl": "KL divergence of the teacher from the trained model",
            "jensen_shannon": f"Jensen-Shannon divergence (beta {config.beta:g}) between teacher and trained model",
        }
        parts = [f"Distillation: {kinds[config.divergence]} at each token"]
        if config.top_k is not None:
            parts.append(f"over the teacher's {config.top_k} likeliest tokens and the rest")
        if config.temperature != 1:
            parts.append(f"at temperature {config.temperature:g}")
        if config.cross_entropy:
            parts.append(f"plus {config.cross_entropy:g} times the cross-entropy")
        if config.served:
            return f"{', '.join(parts)}. The teacher is served."
        names = [role if column is None else f"{role} for {column}" for column, role in self._teachers.items()]
        return f"{', '.join(parts)}. Teacher: {', '.join(names)}."


def _log_norm(distribution: Distribution, temperature: float) -> Tensor | None:
    """Return log sum_v P(v)^(1/T), [n], or None if it is 0."""
    return None if temperature == 1 else distribution.total((distribution.logprobs / temperature).exp()).log()


def _with_rest(top: Tensor) -> Tensor:
    """Append the log-probability of all other events to log-probabilities [n, k]."""
    covered = top.logsumexp(-1, keepdim=True).clamp(max=-_RAREST)
    return torch.cat([top, torch.log(-torch.expm1(covered))], dim=-1)
