"""Handles of GPU memory, as far as no GPU is needed: each worker reads the copy on its own GPU, or says why not."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from file_gpus import FileGpu
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spurline.errors import RunFailedError
from spurline_async_rl.weights.cuda_ipc import HandleMaker, fixed_segments, read_handles
from spurline_models.weight_buckets import WeightBucket
from spurline_ranks.publishing import join_buckets

WEIGHTS = [("a", torch.arange(7.0)), ("b", torch.arange(6, dtype=torch.bfloat16).view(2, 3)), ("c", torch.ones(()))]


def travelled(bucket: WeightBucket) -> WeightBucket:
    """As it comes to another process."""
    return WeightBucket.from_plain(json.loads(json.dumps(bucket.to_plain())))


def maker(folder: Path, name: str) -> HandleMaker:
    return HandleMaker(gpu=FileGpu(folder, name))


def joined(folder: Path) -> WeightBucket:
    """Of two ranks, the second of which has other values, by which its copy is known."""
    buckets = [
        maker(folder, f"GPU-{rank}").make(3, 1, [(name, value + rank) for name, value in WEIGHTS]) for rank in range(2)
    ]
    return travelled(join_buckets(buckets))


def test_each_worker_reads_the_copy_on_its_own_gpu(tmp_path: Path) -> None:
    bucket = joined(tmp_path)
    for rank in range(2):
        read = read_handles(bucket, FileGpu(tmp_path, f"GPU-{rank}"))
        assert [name for name, _ in read] == [name for name, _ in WEIGHTS]
        for (_, got), (_, expected) in zip(read, WEIGHTS, strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected + rank)


def test_a_worker_on_another_gpu_than_any_rank_is_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"on GPU GPU-7, .*GPU-0, GPU-1.*weight_sync"):
        read_handles(joined(tmp_path), FileGpu(tmp_path, "GPU-7"))


def test_memory_is_given_back_when_it_has_been_taken_or_the_next_bucket_is_made(tmp_path: Path) -> None:
    making = maker(tmp_path, "GPU-0")
    for number in (1, 2, 3):
        making.make(1, number, WEIGHTS)
        assert [path.name for path in tmp_path.iterdir()] == [f"GPU-0-{number}"]
    making.taken()
    assert list(tmp_path.iterdir()) == []
    making.taken()
    making.make(2, 1, WEIGHTS)
    making.close()
    assert list(tmp_path.iterdir()) == []


tensors = st.builds(
    lambda dtype, shape, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 9),
)


@given(st.lists(tensors, min_size=1, max_size=5))
def test_any_weights_come_as_they_were(tmp_path_factory: Any, values: list[Tensor]) -> None:
    folder: Path = tmp_path_factory.mktemp("gpu")
    weights = [(f"w{number}", value) for number, value in enumerate(values)]
    bucket = travelled(maker(folder, "GPU-0").make(1, 1, iter(weights)))
    read = read_handles(bucket, FileGpu(folder, "GPU-0"))
    assert [(name, value.dtype, value.shape) for name, value in read] == [
        (name, value.dtype, value.shape) for name, value in weights
    ]
    assert all(torch.equal(got, expected) for (_, got), expected in zip(read, values, strict=True))


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch cannot tell its settings")
def test_segments_do_not_expand_while_a_buffer_is_allocated_and_all_else_stays() -> None:
    read: Any = torch._C._accelerator_getAllocatorSettings
    change: Any = torch._C._accelerator_setAllocatorSettings
    change("expandable_segments:True,max_split_size_mb:128")
    try:
        seen: list[str] = []
        with suppress(KeyError), fixed_segments():
            seen.append(read())
            raise KeyError
        assert [*seen, read()] == [f"expandable_segments:{on},max_split_size_mb:128" for on in (False, True)]
    finally:
        change("expandable_segments:False")
    with fixed_segments():
        assert read() == "expandable_segments:False"


def test_segments_do_not_expand_where_torch_cannot_tell_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", changes.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    with fixed_segments():
        assert changes == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True")
    with fixed_segments():
        assert changes == ["max_split_size_mb:128,expandable_segments:False"]
    assert changes[1:] == ["max_split_size_mb:128,expandable_segments:True"]
