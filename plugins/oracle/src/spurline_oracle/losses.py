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

_CHOICES = {"name": ("cross_entropy", "policy", "dpo"), "labels": ("same", "next")}
SETTINGS = ("name", "reduction", "temperature", "labels", "beta", "clip_low", "clip_high", "kl")
_REDUCTIONS = ("token_mean", "sequence_mean", "sum")


def check_loss(dump: Dump) -> None:
    """Raise DataError if the loss of a dump is not known, or its batch lacks a column that it needs."""
    loss, rows = dump.loss, dump.rows
    for key, choices in _CHOICES.items():
        if loss.get(key, choices[0]) not in choices:
            raise DataError(f"loss.{key} is {loss[key]!r}. Give {' or '.join(choices)}.")
    unknown = sorted(set(loss) - set(SETTINGS))
    if unknown:
        raise DataError(f"loss has unknown settings {', '.join(unknown)}. Settings: {', '.join(SETTINGS)}.")
    if isinstance(loss["reduction"], str) and loss["reduction"] not in _REDUCTIONS:
        raise DataError(f"loss.reduction is {loss['reduction']!r}. Give {', '.join(_REDUCTIONS)} or a number.")
    if loss.get("labels", "same") == "same" and _names_next_tokens(rows):
        raise DataError(
            "Labels of the dump name the token after their positions. Give loss={'labels': 'next'} to the recorder. If "
            "the model or the loss shifts labels too, that is the mistake, and the report says `labels shifted twice`."
        )
    needed = ["advantages"] * (loss["name"] == "policy") + ["reference_logprobs"] * bool(loss.get("kl"))
    missing = [name for name in needed if any(name not in row.numbers for row in rows)]
    if missing:
        raise DataError(f"The loss `{loss['name']}` needs the columns {', '.join(missing)}. Give them to micro_batch.")
    if loss["name"] == "dpo":
        pairs = Counter((row.rank, row.micro_batch, row.pair) for row in rows)
        sides = {(row.rank, row.micro_batch, row.pair, row.chosen) for row in rows}
        if any(row.pair is None for row in rows) or set(pairs.values()) != {2} or len(sides) != len(rows):
            raise DataError(
                "The loss `dpo` needs the columns pair and chosen: each number in pair stands for two rows of a "
                "micro-batch, the chosen one and the rejected one."
            )


def _names_next_tokens(rows: Sequence[Row]) -> bool:
    """Say whether labels name the next token wherever they ask for a loss, and elsewhere than in repeated tokens."""
    places = [(row, (row.asked[:-1] > 0).nonzero().flatten()) for row in rows]
    following = all(torch.equal(row.labels[found], row.tokens[found + 1]) for row, found in places)
    return following and any(not torch.equal(row.labels[found], row.tokens[found]) for row, found in places)


def normalized(dump: Dump, asked: Sequence[Tensor], reduction: Any = None) -> list[Tensor]:
    """Return the weights of tokens in the loss, from what each token weighs before (`asked`), by row.

    `reduction` replaces that of the dump.
    """
    reduction = dump.loss["reduction"] if reduction is None else reduction
    rows = [row for row, each in zip(dump.rows, asked, strict=True) if each.any()]
    if dump.loss["name"] == "dpo" and reduction != "sum":
        # Each token of a pair gets the weight of its pair.
        reduction = len({(row.rank, row.micro_batch, row.pair) for row in rows})
    if reduction == "sequence_mean":
        shares = [torch.zeros_like(each) for each in asked]
        for row, each, share in zip(dump.rows, asked, shares, strict=True):
            for found in row.ranges:
                where = slice(found.start, found.stop)
                share[where] = each[where] / each[where].sum().clamp(min=1e-300)
        return normalized(dump, shares, "token_mean")
    total = sum(float(each.sum()) for each in asked)
    divisor = {"token_mean": total, "sum": 1.0}[reduction] if isinstance(reduction, str) else float(reduction)
    return [each / max(divisor, 1e-300) for each in asked]


def mean_of_parts(dump: Dump, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the weights of tokens if each part of the batch, a list by row, is normalized by itself."""
    weights = [normalized(dump, part) for part in parts]
    return [torch.stack(each).mean(0) for each in zip(*weights, strict=True)]


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


def pair_loss(settings: Mapping[str, Any], margin: Tensor) -> Tensor:
    """Return the loss of a pair from the sum over its tokens of log p / p_ref, chosen minus rejected."""
    return -torch.nn.functional.logsigmoid(settings.get("beta", 0.1) * margin)
