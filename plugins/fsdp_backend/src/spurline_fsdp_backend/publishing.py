"""Make buckets of weights in the first rank, so that no weight ever comes to the controller.

Place on the way: shards -> all ranks gather the weights of one bucket -> the first rank's maker -> a description of the
bucket, which the controller passes on. One call makes one bucket: a consumer that stops early leaves no rank in an
exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from spurline.plugins.registry import resolve
from spurline.protocols.rollout_engine import WeightBucket
from spurline.protocols.weight_sync import BucketMaker, MakerChoice
from spurline.ranks.group import Place, RankGroup
from spurline_fsdp_backend.weight_gathering import Bucket, WeightGathering


def buckets_of_ranks(ranks: RankGroup, version: int, choice: MakerChoice) -> Iterator[WeightBucket]:
    """In the controller: see `MakesBuckets`."""
    plain = asdict(choice)
    for number in range(1, ranks.call("num_buckets", plain)[0] + 1):
        yield WeightBucket.from_plain(ranks.call("make_bucket", plain, version, number)[0])
    ranks.call("bucket_taken")


class Publishing:
    """In a rank. dtype: what weights are cast to before they are gathered."""

    def __init__(self, place: Place, gathering: WeightGathering, dtype: torch.dtype) -> None:
        self._place, self._gathering, self._dtype = place, gathering, dtype
        self._choice: Mapping[str, Any] | None = None
        self._maker: BucketMaker | None = None
        self._buckets: list[Bucket] = []

    def num_buckets(self, choice: Mapping[str, Any]) -> int:
        """How many a publish takes with a maker of this `MakerChoice`; until another is chosen, it is kept."""
        if choice != self._choice:
            self._choice = choice
            self._buckets = list(self._gathering.buckets(choice["max_bytes"], self._dtype))
            if self._place.rank == 0:
                if self._maker is not None:
                    self._maker.close()
                self._maker = resolve(choice["maker"], "maker of weight buckets")(**choice["settings"])
        return len(self._buckets)

    def make(self, choice: Mapping[str, Any], version: int, number: int) -> dict[str, Any] | None:
        """The bucket of this number, from 1, from the first rank. A collective."""
        count = self.num_buckets(choice)
        self._place.doing(f"gathering weights for engines, bucket {number} of {count}")
        weights = self._gathering.gather(self._buckets[number - 1], self._dtype)
        if self._maker is None:
            return None
        self._place.doing(f"bringing weights to engines, bucket {number} of {count}")
        return self._maker.make(version, number, weights.items()).to_plain()

    def taken(self) -> None:
        """Every engine has the last bucket."""
        if self._maker is not None:
            self._maker.taken()
