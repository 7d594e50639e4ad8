"""The child process of an engine that breaks its updates silently, in the way that SABOTAGE names.

SABOTAGE is `KIND@N`: from update N on (the first one is number 0), which is still answered as if all was well.
"""

from __future__ import annotations

import os
from typing import Any

from sabotages import IN_FLIGHT, SabotagedWeights
from torch.nn import Parameter

from spurline_async_rl.engines.child_process import main as unbroken_main
from spurline_concurrency.child import Parent
from spurline_models.weight_buckets import WeightBucket
from spurline_rl.engines.in_process.engine import InProcessEngine


def break_updates(kind: str, first: int) -> None:
    """Change the class of the engine in this process."""
    begin, load, set_version = InProcessEngine.begin_update, InProcessEngine.load_bucket, InProcessEngine.set_version
    count = -1
    weights = SabotagedWeights(kind)

    async def begin_update(self: Any, version: int) -> None:
        nonlocal count
        count += 1
        await begin(self, version)
        if kind == "head" and count == first:
            # The model is tied, so only its embeddings are sent.
            head = self._decoder.model.causal.get_output_embeddings()
            head.weight = Parameter(head.weight.clone(), requires_grad=False)

    async def load_bucket(self: Any, bucket: WeightBucket) -> None:
        sent = {place.name: tensor for place, tensor in zip(bucket.places, bucket.tensors, strict=True)}
        got = weights.instead_of(sent, is_broken=count >= first)
        await load(self, WeightBucket(bucket.transport, bucket.places, tensors=tuple(got.values())))

    def set_the_version(self: Any, version: int) -> None:
        if kind == IN_FLIGHT and count >= first:
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
