"""Broadcasts of weights by gloo between processes, without an engine: the cases that tests/gpu has with NCCL."""

from __future__ import annotations

import os

import pytest
import torch
from broadcast_cases import (
    check_that_others_get_the_weights_when_one_is_killed,
    check_that_weights_arrive_bit_for_bit,
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("SPURLINE_SOAK"), reason="other tests send between processes too; SPURLINE_SOAK=1"
    ),
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="weights without a config are taken to be on the GPU"),
]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_arrive_bit_for_bit(dtype: str | None) -> None:
    check_that_weights_arrive_bit_for_bit("cpu", ["cpu", "cpu"], dtype)


@pytest.mark.parametrize("count", [1, 2])
def test_the_others_get_the_weights_when_one_is_killed_while_a_broadcast_waits_for_it(count: int) -> None:
    check_that_others_get_the_weights_when_one_is_killed("cpu", ["cpu"] * count)
