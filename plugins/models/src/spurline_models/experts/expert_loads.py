"""Measure how the routers of a mixture of experts spread the tokens of an optimizer step.

A few experts with most of the tokens make ranks wait, and the other experts learn nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Loads = Mapping[int, NDArray[np.int64]]
"""The tokens that each expert got, int64 [E], by layer of the model, from 0."""


class ExpertLoads:
    """Counts of tokens on the device."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, layer: int, experts: Tensor, num_experts: int, counted: slice | Tensor) -> None:
        """Count the experts [T, top_k] of the layer's tokens; only `counted` tokens belong to samples."""
        # Recomputation in the backward pass has been counted before.
        if torch._C._current_graph_task_id() != -1:
            return
        chosen = experts[counted].flatten()
        if layer not in self._sums:
            self._sums[layer] = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
        self._sums[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

    def fetch(self) -> Loads:
        if not self._sums:
            return {}
        # One transfer, not one per layer.
        parts = torch.cat([*self._sums.values()]).cpu().split([len(sums) for sums in self._sums.values()])
        return {layer: part.numpy() for layer, part in zip(self._sums, parts, strict=True)}


def load_metrics(parts: Iterable[Loads]) -> dict[str, float]:
    """Return the metrics of all ranks' loads; none for a model without experts.

    `moe/imbalance`: tokens of a layer's busiest expert over the mean of its experts, as the mean over layers;
    `moe/imbalance/max`: the same of the worst layer. `moe/idle_experts`: share of experts that got no token.
    """
    totals: dict[int, NDArray[np.int64]] = {}
    for part in parts:
        for layer, load in part.items():
            totals[layer] = totals[layer] + load if layer in totals else load
    counted = [load for _, load in sorted(totals.items()) if load.sum() > 0]
    if not counted:
        return {}
    ratios = [float(load.max() / load.mean()) for load in counted]
    idle = sum(int((load == 0).sum()) for load in counted) / sum(len(load) for load in counted)
    return {"moe/imbalance": sum(ratios) / len(ratios), "moe/imbalance/max": max(ratios), "moe/idle_experts": idle}
