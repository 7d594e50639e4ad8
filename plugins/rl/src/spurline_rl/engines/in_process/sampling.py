"""Draw the next token of each row. A token depends only on the row's logits, settings and random number."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from spurline_rl.engines.in_process.response import support_row
from spurline_rl.protocols.rollout_engine import Sampling


@dataclass(frozen=True)
class Sampled:
    """The next token of each row.

    Attributes:
        logprobs: Logprobs after temperature, top-k and top-p. Greedy rows have the model's own, as in vLLM.
        supports: `support_row` of each row with `support_width`, and None for other rows.
    """

    tokens: list[int]
    logprobs: list[float]
    supports: list[NDArray[np.int32] | None]


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) that depends only on the seed and the position in the response."""
    bits = xxhash.xxh3_64_intdigest(struct.pack("<Qq", seed & 0xFFFF_FFFF_FFFF_FFFF, position))
    # With 52 bits, the product of this number and a sum of probabilities is below the sum even after rounding.
    return (bits >> 12) * 2.0**-52


def sample(logits: Tensor, settings: Sequence[Sampling], uniforms: Sequence[float]) -> Sampled:
    """Draw a token for each row of `logits` [N, V], after temperature, top-k and top-p."""
    if logits.dtype != torch.float64:
        # A softmax over 1e5 half-precision logits would not be exact enough.
        logits = logits.float()
    is_plain = all(setting.temperature in (0, 1) and not _cuts(setting) for setting in settings)
    kept = (logits if is_plain else _adjust(logits, settings)).log_softmax(-1)
    tokens = _draw(kept, uniforms)
    greedy = [number for number, setting in enumerate(settings) if setting.temperature == 0]
    if greedy:
        rows = torch.tensor(greedy, device=logits.device)
        tokens[rows] = logits[rows].argmax(-1)
    width = max((setting.support_width for setting in settings), default=0)
    likeliest = kept.topk(min(width + 1, kept.shape[-1]) if width else 0)
    # One transfer from the device; float64 holds token ids exactly.
    drawn = [tokens.unsqueeze(-1), kept.gather(-1, tokens.unsqueeze(-1))]
    columns = torch.cat([column.double() for column in (*drawn, *likeliest)], dim=1).cpu().numpy()
    found, ids = np.split(columns[:, 2:], 2, axis=1)
    return Sampled(
        columns[:, 0].astype(np.int64).tolist(),
        columns[:, 1].tolist(),
        [
            support_row(row_ids, row_logprobs, setting.support_width) if setting.support_width else None
            for setting, row_ids, row_logprobs in zip(settings, ids, found, strict=True)
        ],
    )


def _cuts(setting: Sampling) -> bool:
    return setting.temperature != 0 and (setting.top_k > 0 or setting.top_p < 1)


def _adjust(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Divide logits by the temperature, and set logits of cut-off tokens to -inf. Greedy rows stay unchanged."""
    temperatures = torch.tensor([setting.temperature or 1.0 for setting in settings], dtype=logits.dtype)
    logits = logits / temperatures.to(logits.device).unsqueeze(-1)
    cut = [number for number, setting in enumerate(settings) if _cuts(setting)]
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        logits[rows] = _cut_off(logits[rows], [settings[number] for number in cut])
    return logits


def _cut_off(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Keep the top_k largest logits and ties. Of these, keep the likeliest until their probabilities sum to top_p."""
    size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    last = torch.tensor([min(setting.top_k or size, size) - 1 for setting in settings], device=logits.device)
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, last.unsqueeze(-1)), -torch.inf)
    probabilities = ordered.softmax(-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    # With top_p 1, rounding must not cut off the last tokens.
    mass = torch.tensor([setting.top_p if setting.top_p < 1 else torch.inf for setting in settings]).double()
    ordered = ordered.masked_fill(before >= mass.to(logits.device).unsqueeze(-1), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _draw(logprobs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return the token at which the cumulative distribution of each row exceeds its random number."""
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    points = torch.tensor(uniforms, dtype=torch.float64).to(logprobs.device).unsqueeze(-1) * cumulative[:, -1:]
    # With `right`, a token of probability zero is never found. Rows with NaN get the last token and a logprob of NaN.
    return torch.searchsorted(cumulative, points, right=True).squeeze(-1).clamp_(max=logprobs.shape[-1] - 1)
