"""How evenly the routers of a mixture of experts spread the tokens of an optimizer step.

Place on the way: routers of a training forward -> counts per layer and expert -> sums over ranks -> metrics. A few
experts that get most tokens make ranks wait for each other, and the others learn nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Loads = Mapping[int, NDArray[np.int64]]
"""Layer of the model, from 0 -> tokens that each expert got."""


class ExpertLoads:
    """Counts on the device, as long as routers are given it."""

    def __init__(self) -> None:
        self._tokens: dict[int, Tensor] = {}

    def add(self, layer: int, experts: Tensor, num_experts: int, counted: slice | Tensor) -> None:
        """Count experts [T, top_k] of a layer. counted: the tokens that belong to samples."""
        # What is computed again in the backward pass has been counted.
        if torch._C._current_graph_task_id() != -1:
            return
        chosen = experts[counted].flatten()
        if layer not in self._tokens:
            self._tokens[layer] = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
        self._tokens[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

    def fetch(self) -> Loads:
        """What was counted, on the host."""
        if not self._tokens:
            return {}
        # One transfer, not one per layer.
        counts = torch.cat([*self._tokens.values()]).cpu().split([len(tokens) for tokens in self._tokens.values()])
        return {layer: tokens.numpy() for layer, tokens in zip(self._tokens, counts, strict=True)}


def load_metrics(parts: Iterable[Loads]) -> dict[str, float]:
    """Metrics of what all ranks counted; none for a model without experts.

    `moe/imbalance`: tokens of a layer's busiest expert over the mean of its experts, 1 where all get equally many, as
    the mean over layers; `moe/imbalance/max` is that of the worst layer. `moe/idle_experts`: share of experts that got
    no token.
    """
    totals: dict[int, NDArray[np.int64]] = {}
    for part in parts:
        for layer, tokens in part.items():
            totals[layer] = totals[layer] + tokens if layer in totals else tokens
    counted = [tokens for _, tokens in sorted(totals.items()) if tokens.sum() > 0]
    if not counted:
        return {}
    ratios = [float(tokens.max() / tokens.mean()) for tokens in counted]
    idle = sum(int((tokens == 0).sum()) for tokens in counted) / sum(len(tokens) for tokens in counted)
    return {"moe/imbalance": sum(ratios) / len(ratios), "moe/imbalance/max": max(ratios), "moe/idle_experts": idle}
