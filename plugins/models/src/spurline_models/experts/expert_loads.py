"""Measure how the routers of a mixture of experts spread the tokens of an optimizer step.

Place on the way: routers of a training forward -> sums per layer -> sums over ranks -> metrics. A few experts that get
most tokens make ranks wait for each other, and the others learn nothing; a router that is as undecided as it can be has
learned nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class LayerLoad:
    """The load of one layer's experts.

    Attributes:
        tokens: int64 [E], the tokens that each expert got.
        entropy: Entropy of how the router shares a token out over experts, in nats, summed over `measured` tokens.
        measured: Tokens whose entropy is known.
    """

    tokens: NDArray[np.int64]
    entropy: float = 0.0
    measured: int = 0

    def __add__(self, other: LayerLoad) -> LayerLoad:
        measured = self.measured + other.measured
        return LayerLoad(self.tokens + other.tokens, self.entropy + other.entropy, measured)


Loads = Mapping[int, LayerLoad]
"""Loads by layer of the model, counted from 0."""


class ExpertLoads:
    """Sums on the device, as long as routers are given it."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(
        self, layer: int, experts: Tensor, num_experts: int, counted: slice | Tensor, shares: Tensor | None = None
    ) -> None:
        """Count the experts of a layer's tokens.

        Args:
            layer: Number of the layer, from 0.
            experts: [T, top_k], the experts that each token goes to.
            num_experts: Experts of the layer.
            counted: The tokens that belong to samples.
            shares: [T, num_experts], how each token is shared out over all experts, rows of sum 1, where it is known.
        """
        # What is computed again in the backward pass has been counted.
        if torch._C._current_graph_task_id() != -1:
            return
        chosen = experts[counted].flatten()
        if layer not in self._sums:
            # Tokens of each expert, entropy, tokens measured: one tensor is one transfer, and doubles count exactly.
            self._sums[layer] = torch.zeros(num_experts + 2, dtype=torch.float64, device=chosen.device)
        sums = self._sums[layer]
        sums.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=sums.dtype))
        if shares is not None:
            entropies = torch.special.entr(shares[counted]).sum(-1)
            sums[-2] += entropies.sum(dtype=sums.dtype)
            sums[-1] += len(entropies)

    def fetch(self) -> Loads:
        """Return the loads, on the host."""
        if not self._sums:
            return {}
        # One transfer, not one per layer.
        parts = torch.cat([*self._sums.values()]).cpu().split([len(sums) for sums in self._sums.values()])
        return {
            layer: LayerLoad(part[:-2].long().numpy(), float(part[-2]), int(part[-1]))
            for layer, part in zip(self._sums, parts, strict=True)
        }


def load_metrics(parts: Iterable[Loads]) -> dict[str, float]:
    """Return the metrics of all ranks' loads; none for a model without experts.

    `moe/imbalance`: tokens of a layer's busiest expert over the mean of its experts, 1 where all get equally many, as
    the mean over layers; `moe/imbalance/max` is that of the worst layer. `moe/idle_experts`: share of experts that got
    no token. `moe/router_entropy`: how undecided routers are, the mean entropy of how a token is shared out over
    experts, as a part of the largest one, ln(experts): 0 gives one expert all, 1 all the same; the mean over layers.
    """
    totals: dict[int, LayerLoad] = {}
    for part in parts:
        for layer, load in part.items():
            totals[layer] = totals[layer] + load if layer in totals else load
    counted = [load for _, load in sorted(totals.items()) if load.tokens.sum() > 0]
    if not counted:
        return {}
    ratios = [float(load.tokens.max() / load.tokens.mean()) for load in counted]
    idle = sum(int((load.tokens == 0).sum()) for load in counted) / sum(len(load.tokens) for load in counted)
    metrics = {"moe/imbalance": sum(ratios) / len(ratios), "moe/imbalance/max": max(ratios), "moe/idle_experts": idle}
    measured = [load for load in counted if load.measured and len(load.tokens) > 1]
    if measured:
        entropies = [load.entropy / load.measured / math.log(len(load.tokens)) for load in measured]
        metrics["moe/router_entropy"] = sum(entropies) / len(entropies)
    return metrics
