"""Compute the losses that a dump can name, and the weight of each token in their sum.

Token losses are summed with weights; the reduction sets the weights. DPO joins the sequences of a pair:

- `cross_entropy`: l_t = -log p_t
- `policy` (PPO, GRPO, DAPO): l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + kl (e^d - d - 1), where
  r_t = p_t / p_old_t and d = log p_ref_t - log p_t. Without `old_logprobs`, r_t has the value 1.
- `dpo` (Rafailov et al. 2023): l = -log sigmoid(beta (sum_t log p_t / p_ref_t of the chosen - that of the rejected))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spurline.errors import DataError
from spurline_oracle.dump import Dump, Row

NAMES = ("cross_entropy", "policy", "dpo")
SETTINGS = ("name", "reduction", "temperature", "labels", "beta", "clip_low", "clip_high", "kl")
_REDUCTIONS = ("token_mean", "sequence_mean", "sum")


def check_loss(dump: Dump) -> None:
    """Raise DataError if the loss of a dump is not known, or its batch lacks a column that it needs."""
    loss, rows = dump.loss, dump.rows
    if loss["name"] not in NAMES:
        raise DataError(f"loss.name is {loss['name']!r}. Losses: {', '.join(NAMES)}.")
    unknown = sorted(set(loss) - set(SETTINGS))
    if unknown:
        raise DataError(f"loss has unknown settings {', '.join(unknown)}. Settings: {', '.join(SETTINGS)}.")
    if isinstance(loss["reduction"], str) and loss["reduction"] not in _REDUCTIONS:
        raise DataError(f"loss.reduction is {loss['reduction']!r}. Give {', '.join(_REDUCTIONS)} or a number.")
    needed = {"policy": ["advantages"] + ["reference_logprobs"] * bool(loss.get("kl"))}.get(loss["name"], [])
    missing = [name for name in needed if any(name not in row.numbers for row in rows)]
    if missing:
        raise DataError(f"The loss `{loss['name']}` needs the columns {', '.join(missing)}. Give them to micro_batch.")
    if loss["name"] == "dpo":
        sides = Counter((row.rank, row.micro_batch, row.pair) for row in rows)
        both = {(row.rank, row.micro_batch, row.pair, row.chosen) for row in rows}
        if None in {row.pair for row in rows} or set(sides.values()) != {2} or len(both) != len(rows):
            raise DataError(
                "The loss `dpo` needs the columns pair and chosen: each number in pair stands for two rows of a "
                "micro-batch, the chosen one and the rejected one."
            )


def normalized(dump: Dump, asked: Sequence[Tensor], reduction: Any = None, among: Sequence[int] | None = None) -> list[Tensor]:
    """Return the weights of tokens in the loss, one tensor [length] for each row.

    Args:
        dump: The dump.
        asked: What each token weighs before it is normalized, by row.
        reduction: A reduction. If None, that of the dump.
        among: The rows that are normalized together. All others get weights of 0. If None, all rows.
    """
    reduction = dump.loss["reduction"] if reduction is None else reduction
    chosen = range(len(asked)) if among is None else among
    if dump.loss["name"] == "dpo" and reduction != "sum":
        # Each token of a pair gets the weight of its pair.
        pairs = {(dump.rows[index].rank, dump.rows[index].micro_batch, dump.rows[index].pair) for index in chosen}
        reduction = max(len(pairs), 1)
    weights = [torch.zeros_like(each) for each in asked]
    if reduction == "sequence_mean":
        parts = [(index, _part(asked[index], dump.rows[index], each)) for index in chosen for each in dump.rows[index].ranges]
        parts = [(index, part) for index, part in parts if part.sum() > 0]
        for index, part in parts:
            weights[index] += part / part.sum() / len(parts)
        return weights
    total = sum(float(asked[index].sum()) for index in chosen)
    divisor = {"token_mean": total, "sum": 1.0}[reduction] if isinstance(reduction, str) else float(reduction)
    for index in chosen:
        weights[index] = asked[index] / max(divisor, 1e-300)
    return weights


def _part(asked: Tensor, row: Row, each: range) -> Tensor:
    part = torch.zeros_like(asked)
    part[each.start : each.stop] = asked[each.start : each.stop]
    return part


def token_losses(settings: Mapping[str, Any], logprobs: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of each token, from its log-probability and the columns for it, all [length]."""
    if settings["name"] == "cross_entropy":
        return -logprobs
    advantages = numbers["advantages"]
    ratio = (logprobs - numbers.get("old_logprobs", logprobs.detach())).exp()
    low, high = settings.get("clip_low", 0.2), settings.get("clip_high", settings.get("clip_low", 0.2))
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if settings.get("kl"):
        difference = numbers["reference_logprobs"] - logprobs
        losses = losses + settings["kl"] * (difference.exp() - difference - 1)
    return losses


def pair_loss(settings: Mapping[str, Any], margins: Tensor) -> Tensor:
    """Return the loss of a pair from the sum over its tokens of log p / p_ref, chosen minus rejected."""
    return -torch.nn.functional.logsigmoid(settings.get("beta", 0.1) * margins)
