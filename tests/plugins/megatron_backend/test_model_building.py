"""Where the weights of a model are built, and in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megatron_layouts import write_llama3, write_qwen3, write_qwen3_moe, write_qwen25

from spurline.protocols.ranks import RankRequest
from spurline_ranks.group import RankGroup, TimeLimits, open_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def rank() -> Iterator[RankGroup]:
    request = RankRequest(1, num_threads=1)
    group = open_ranks(request, "megatron_layer_workers:BuildingRank", (), TimeLimits(120, 60, 60))
    yield group
    group.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("write", [write_qwen3, write_qwen25, write_llama3, write_qwen3_moe])
def test_with_a_gpu_all_weights_are_on_it_in_the_dtype_of_the_run_but_those_of_a_value_head_in_fp32(
    rank: RankGroup, write: Callable[[Path], Path], critic: bool, precision: str, tmp_path: Path
) -> None:
    settings = {"name": "megatron", "device": "cuda", "ranks": 1, "precision": precision}
    [found] = rank.call("devices", str(write(tmp_path)), settings, critic)
    assert ("value_head.weight" in found) == critic
    if write is write_qwen3_moe:
        assert any(name.endswith("router.weight") for name in found)
    dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
    expected = dict.fromkeys(found, ("meta", dtype))
    if critic:
        expected["value_head.weight"] = ("meta", "torch.float32")
    assert found == expected
