"""A bucket of weights as plain data, for a call to another process.

Place on the way: transport -> WeightBucket -> `to_wire` -> RPC or HTTP -> `from_wire` -> the worker's readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spurline.protocols.rollout_engine import TensorPlace, WeightBucket


def to_wire(bucket: WeightBucket) -> dict[str, Any]:
    """JSON-able; tensors of a transport within one process do not travel."""
    places = [[place.name, place.dtype, list(place.shape), place.offset] for place in bucket.places]
    return {"transport": bucket.transport, "where": dict(bucket.where), "places": places}


def from_wire(wire: Mapping[str, Any]) -> WeightBucket:
    """The bucket that `to_wire` wrote."""
    places = tuple(TensorPlace(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in wire["places"])
    return WeightBucket(wire["transport"], places, wire["where"])
