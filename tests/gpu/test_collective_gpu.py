"""Broadcasts of weights by NCCL between processes with a GPU each, without an engine: the cases that pass on CPUs."""

from __future__ import annotations

import pytest
import torch
from broadcast_cases import check_that_others_get_the_weights_when_one_is_killed, check_that_weights_arrive_bit_for_bit

from spurline_async_rl.weights.packing import pack, unpack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def needs_gpus(count: int) -> pytest.MarkDecorator:
    few = torch.cuda.device_count() < count
    return pytest.mark.skipif(few, reason=f"needs {count} GPUs: NCCL wants one per process")


@needs_gpus(2)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_arrive_bit_for_bit_in_two_buckets_of_memory(dtype: str | None) -> None:
    places = [f"cuda:{number}" for number in range(1, min(torch.cuda.device_count(), 3))]
    check_that_weights_arrive_bit_for_bit("cuda:0", places, dtype)


@needs_gpus(3)
def test_the_other_receiver_gets_the_weights_when_one_is_killed_while_a_broadcast_waits_for_it() -> None:
    check_that_others_get_the_weights_when_one_is_killed("cuda:0", ["cuda:1", "cuda:2"])


@needs_gpus(2)
def test_a_receiver_that_was_killed_alone_is_served_when_another_has_come() -> None:
    check_that_others_get_the_weights_when_one_is_killed("cuda:0", ["cuda:1"])


def test_packing_lays_weights_out_as_on_the_cpu() -> None:
    weights = [(f"w{number}", torch.randn(1000 + number).to(torch.bfloat16)) for number in range(7)]
    _, places = pack(weights, None, torch.device("cpu"))
    there, places_there = pack([(name, tensor.cuda()) for name, tensor in weights], None, torch.device("cuda"))
    assert places == places_there
    for (name, tensor), (name_there, back) in zip(weights, unpack(there, places), strict=True):
        assert name == name_there
        assert torch.equal(tensor, back.cpu())
