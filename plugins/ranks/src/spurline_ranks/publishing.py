"""Publish weights from the ranks in buckets. Weights never pass through the controller.

Data flow: parts of weights -> one whole bucket at a time (in the first rank, the bucket's owner, or all ranks) ->
the `BucketMaker` of these ranks -> a description of the bucket -> controller. Each call makes one bucket, so a
consumer may stop after any bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from spurline.plugins.registry import resolve
from spurline_models.weight_buckets import BucketMaker, MakerChoice, WeightBucket
from spurline_ranks.group import Place, RankGroup
from spurline_ranks.weight_gathering import Bucket, WeightGathering


def buckets_of_ranks(ranks: RankGroup, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
    """Ask the ranks for one bucket after another. See `MakesBuckets`."""
    plain = asdict(choice)
    for number in range(first, ranks.call("publishing.num_buckets", plain)[0] + 1):
        made = [answer for answer in ranks.call("publishing.make", plain, version, number) if answer is not None]
        yield join_buckets([WeightBucket.from_plain(answer) for answer in made])
    ranks.call("publishing.taken")


def join_buckets(buckets: Sequence[WeightBucket]) -> WeightBucket:
    """Join the descriptions of the same weights from several processes.

    The descriptions may differ only in mappings inside `where`. These mappings are merged, and the first value of each
    key is kept.
    """
    first, *others = buckets
    where = dict(first.where)
    for other in others:
        assert (other.transport, other.places) == (first.transport, first.places), (first, other)
        for key, value in other.where.items():
            known: Any = where.setdefault(key, value)
            if isinstance(value, Mapping):
                where[key] = {**known, **value, **known}
            else:
                assert known == value, (key, known, value)
    machines = {bucket.machine for bucket in buckets}
    return WeightBucket(first.transport, first.places, where, machine=first.machine if len(machines) == 1 else "")


@dataclass(frozen=True)
class _Plan:
    """The buckets for a `MakerChoice`, and the ranks that make each bucket. `maker` is None if this rank makes none."""

    gathering: WeightGathering
    dtype: torch.dtype | None
    buckets: Sequence[Bucket]
    makers: Sequence[Sequence[int]]
    maker: BucketMaker | None


class Publishing:
    """Makes buckets in a rank.

    Args:
        place: The place of this rank.
        gatherings: The `WeightGathering` of each part that may be published, `model` and `adapter`.
        dtype: The dtype in which the weights of the model are gathered, unless a choice names another dtype.
    """

    def __init__(self, place: Place, gatherings: Mapping[str, WeightGathering], dtype: torch.dtype) -> None:
        self._place, self._gatherings, self._dtype = place, gatherings, dtype
        self._choice: Mapping[str, Any] | None = None
        self._plan: _Plan | None = None

    def num_buckets(self, choice: Mapping[str, Any]) -> int:
        """Return the number of buckets. The maker is kept until a call has a different `MakerChoice`."""
        return len(self._planned(choice).buckets)

    def make(self, choice: Mapping[str, Any], version: int, number: int) -> dict[str, Any] | None:
        """Make bucket `number`, counted from 1. Return None if other ranks make it. All ranks call this together."""
        plan = self._planned(choice)
        bucket, makers, count = plan.buckets[number - 1], plan.makers[number - 1], len(plan.buckets)
        self._place.doing(f"gathering weights for engines, bucket {number} of {count}")
        weights = plan.gathering.gather(bucket, plan.dtype, makers)
        if self._place.rank not in makers:
            return None
        assert plan.maker is not None, (self._place.rank, makers)
        self._place.doing(f"sending weights to engines, bucket {number} of {count}")
        return plan.maker.make(version, number, _one_by_one(weights)).to_plain()

    def taken(self) -> None:
        if self._plan is not None and self._plan.maker is not None:
            self._plan.maker.taken()

    def _planned(self, choice: Mapping[str, Any]) -> _Plan:
        """Return the plan of this choice. If it is new, close the old maker first."""
        if self._plan is None or choice != self._choice:
            old, self._plan = self._plan, None
            if old is not None and old.maker is not None:
                old.maker.close()
            self._choice, self._plan = choice, self._plan_of(choice)
        return self._plan

    def _plan_of(self, choice: Mapping[str, Any]) -> _Plan:
        gathering, dtype = self._gatherings[choice["part"]], None if choice["part"] == "adapter" else self._dtype
        if choice["dtype"] is not None:
            dtype = cast("torch.dtype", getattr(torch, choice["dtype"]))
        made_by = choice["made_by"]
        buckets = list(gathering.buckets(choice["max_bytes"], dtype, by_owner=made_by == "owners"))
        everybody = range(self._place.world)
        makers = [
            everybody if made_by == "all" else [gathering.owner_of(bucket) if made_by == "owners" else 0]
            for bucket in buckets
        ]
        senders = sorted({rank for ranks in makers for rank in ranks})
        maker = None
        if self._place.rank in senders:
            settings = dict(choice["settings"])
            if made_by != "first":
                settings |= {"sender": senders.index(self._place.rank), "senders": len(senders)}
            maker = resolve(choice["maker"], "maker of weight buckets")(**settings)
        return _Plan(gathering, dtype, buckets, makers, maker)


def _one_by_one(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (hf_name, tensor). Each tensor is freed before the next one, since the maker has copied it by then."""
    for name in [*weights]:
        yield name, weights.pop(name)
