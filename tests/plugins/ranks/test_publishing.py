"""Several processes that made the same bucket are told of as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from spurline_models.weight_buckets import TensorPlace, WeightBucket
from spurline_ranks.publishing import join_buckets

PLACES = (TensorPlace("w", "float32", (2, 3)),)


def made(where: Mapping[str, Any], machine: str = "here") -> WeightBucket:
    return WeightBucket("some", PLACES, where, machine=machine)


def test_one_bucket_stays_as_it_is() -> None:
    assert join_buckets([made({"a": 1, "b": {"c": 2}})]) == made({"a": 1, "b": {"c": 2}})


def test_mappings_are_joined_one_level_deep_and_the_first_of_equal_keys_is_kept() -> None:
    buckets = [
        made({"bytes": 8, "by_gpu": {"x": {"n": 1}}}),
        made({"bytes": 8, "by_gpu": {"y": {"n": 2}}}),
        made({"bytes": 8, "by_gpu": {"x": {"m": 3}}, "only": "there"}),
    ]
    assert join_buckets(buckets) == made({"bytes": 8, "by_gpu": {"x": {"n": 1}, "y": {"n": 2}}, "only": "there"})
    assert buckets[0].where == {"bytes": 8, "by_gpu": {"x": {"n": 1}}}


def test_buckets_of_several_machines_are_not_of_one() -> None:
    assert join_buckets([made({}), made({})]).machine == "here"
    assert join_buckets([made({}), made({}, "there")]).machine == ""


def test_processes_that_contradict_each_other_are_noticed() -> None:
    with pytest.raises(AssertionError):
        join_buckets([made({"bytes": 8}), made({"bytes": 9})])
    with pytest.raises(AssertionError):
        join_buckets([made({}), replace(made({}), places=())])
