"""Weight sync `in_process`: hand the tensors themselves to an engine in this process, which copies them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from spurline.protocols.rollout_engine import WeightBucket
from spurline_async_rl.weights.buckets import BucketSync, cut, place_of


class InProcessSync(BucketSync):
    """A `WeightSync`. Both sides see the same memory, so there is nothing that a checksum could find."""

    transport = "in_process"

    def make_buckets(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Iterator[WeightBucket]:
        for held in cut(weights, self.max_bucket_bytes):
            places = tuple(place_of(name, tensor) for name, tensor in held)
            yield WeightBucket(self.transport, places, tensors=tuple(tensor for _, tensor in held))
