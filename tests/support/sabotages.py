"""Ways in which engines confirm an update, and then generate with something else than what was published.

`docs/benchmarks.md` has the table of what finds them out where.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FROZEN = ("never updated", "frozen", "all frozen")
"""The engine keeps the weights that it has: from the first update on, later, and together with its neighbours."""
WRONG_WEIGHTS = ("late", "one tensor", "head", "other model")
"""It gets the weights of the version before, another rank's shard of one tensor, the head as it was, or weights of
another model of the same shape."""
PREFIX_CACHE, IN_FLIGHT = "prefix cache", "keys in flight"
"""It keeps keys and values of older weights for later requests with the same prompt, or for unfinished ones."""
KINDS = (*FROZEN, *WRONG_WEIGHTS, PREFIX_CACHE, IN_FLIGHT)


def first_broken(kind: str) -> int:
    """Return how many publishes arrive before the engine is broken."""
    return 1 if kind == FROZEN[0] else 2


class SabotagedWeights:
    """The weights, or an adapter's, that one engine gets instead of the published ones, publish after publish."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._before: dict[str, Tensor] = {}

    def instead_of(self, sent: Mapping[str, Tensor], *, is_broken: bool) -> dict[str, Tensor]:
        """Return what arrives when some or all tensors of a publish are sent."""
        new = {name: tensor.clone() for name, tensor in sent.items()}
        got = {name: self._wrong(name, tensor) for name, tensor in new.items()} if is_broken else new
        if not is_broken or self._kind == "late":
            self._before |= new
        return got

    def _wrong(self, name: str, tensor: Tensor) -> Tensor:
        if self._kind in (*FROZEN, "late") or (self._kind == "head" and name == "lm_head.weight"):
            return self._before[name]
        if self._kind == "one tensor" and "layers.0.mlp.down_proj" in name and "lora_A" not in name:
            return tensor.roll(tensor.shape[0] // 2, 0)
        if self._kind == "other model":
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
            return tensor.mean() + tensor.std(correction=0) * noise
        return tensor
