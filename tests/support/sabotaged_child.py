"""The child process of an engine that breaks its updates silently, in the way that SABOTAGE names.

SABOTAGE is `KIND@N`: from update N on (the first one is number 0), which is still answered as if all was well.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from spurline.child import Parent
from spurline_async_rl.engines.child_process import main as unbroken_main
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.engines.in_process.engine import InProcessEngine

KINDS = ("frozen", "late", "one_tensor", "tied_head", "other_model", "stale_cache")


def break_updates(kind: str, first: int) -> None:
    """Change the class of the engine in this process."""
    begin, load, set_version = InProcessEngine.begin_update, InProcessEngine.load_bucket, InProcessEngine.set_version
    count = -1
    held: dict[str, torch.Tensor] = {}

    async def begin_update(self: Any, version: int) -> None:
        nonlocal count
        count += 1
        await begin(self, version)

    async def load_bucket(self: Any, bucket: WeightBucket) -> None:
        is_broken = count >= first
        if is_broken and kind == "frozen":
            self._writer._missing.clear()
            return
        tensors = {place.name: tensor for place, tensor in zip(bucket.places, bucket.tensors, strict=True)}
        sent = dict(tensors)
        for name, tensor in tensors.items():
            if kind == "late":
                if is_broken:
                    sent[name] = held.get(name, tensor)
                held[name] = tensor.clone()
            elif is_broken and kind == "one_tensor" and name.endswith("0.mlp.down_proj.weight"):
                # The shard of another rank.
                sent[name] = tensor.roll(tensor.shape[0] // 2, 0)
            elif kind == "tied_head" and name.endswith("embed_tokens.weight"):
                if is_broken:
                    sent[name] = held.get(name, tensor)
                held.setdefault(name, tensor.clone())
            elif is_broken and kind == "other_model":
                sent[name] = tensor + 0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        await load(self, WeightBucket(bucket.transport, bucket.places, tensors=tuple(sent.values())))

    def set_the_version(self: Any, version: int) -> None:
        if kind == "stale_cache" and count >= first:
            self._version = version
        else:
            set_version(self, version)

    InProcessEngine.begin_update = begin_update  # type: ignore[method-assign]
    InProcessEngine.load_bucket = load_bucket  # type: ignore[method-assign]
    InProcessEngine.set_version = set_the_version  # type: ignore[method-assign]


def main(parent: Parent) -> None:
    kind, _, first = os.environ.get("SABOTAGE", "").partition("@")
    if kind:
        break_updates(kind, int(first))
    unbroken_main(parent)
