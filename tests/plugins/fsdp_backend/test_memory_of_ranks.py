"""No rank holds more than its part: not after loading, and not while weights are written or read."""

from __future__ import annotations

import filecmp
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fsdp_layouts import in_bf16
from run_helpers import anonymous_bytes

from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_fsdp_backend.trained_model import read_weights
from spurline_models.abilities import YieldsDevice
from spurline_models.testing import write_tiny_model
from spurline_models.weight_files import write_weight_files
from spurline_rl.testing.backend_cases import assert_weights_equal, minibatch, weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MIB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 970 MB of fp32 weights, of which the embedding is the largest tensor, in files of bf16."""
    folder = tmp_path_factory.mktemp("large")
    shape = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 11}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    write_tiny_model(folder, **shape, **heads)
    # What a file holds in the precision that is trained in stays a mapped file until the first step.
    return in_bf16(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def ranks_of(model: Path, ranks: int) -> Iterator[tuple[Backend, list[int]]]:
    """The backend, and the process ids of its ranks."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    # A model that packs exactly needs no probe, which gathers it.
    settings: dict[str, Any] = {"name": "fsdp", "device": "cpu", "ranks": ranks, "num_threads": 1, "probe": False}
    with opened(backend_run(model, settings, ("fsdp_backend",))) as (backend, _):
        after = {child.pid for child in psutil.Process().children(recursive=True)}
        yield backend, sorted(after - before)[-ranks:]


class Peak:
    """By how much `anonymous_bytes` of any of some processes grow while the context is open, at most."""

    def __init__(self, pids: list[int]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._before = {pid: anonymous_bytes(pid) for pid in pids}
        self.more = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.more = max(self.more, *(anonymous_bytes(pid) - before for pid, before in self._before.items()))
            time.sleep(0.005)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_after_loading_a_rank_holds_libraries_and_its_shard(large: Path, tiny: Path, ranks: int) -> None:
    with ranks_of(tiny, ranks) as (_, pids):
        libraries = max(map(anonymous_bytes, pids))
    with ranks_of(large, ranks) as (backend, pids):
        shard = 4 * int(backend.facts()["parameters"]) / ranks
        assert shard * ranks > 900 * MIB
        held = max(map(anonymous_bytes, pids))
        assert held <= libraries + 1.1 * shard


def test_writing_and_reading_a_checkpoint_take_the_memory_of_one_tensor(large: Path, tmp_path: Path) -> None:
    with ranks_of(large, 2) as (backend, pids):
        backend.update(*minibatch("packed", ParallelLayout()))
        shard = 4 * int(backend.facts()["parameters"]) / 2
        for_saving = Peak(pids)
        with for_saving:
            digests = backend.save(tmp_path)
    with ranks_of(large, 2) as (backend, pids):
        for_loading = Peak(pids)
        with for_loading:
            backend.load(tmp_path, digests)
    embedding = 32000 * 1024 * 4 / 2
    assert for_saving.more < embedding
    # What AdamW keeps is twice the weights, and the first thing there is of it in a new process.
    assert for_loading.more < 2 * shard + embedding


def test_export_takes_the_memory_of_a_few_tensors_of_a_rank_and_of_a_process_alone(large: Path, tmp_path: Path) -> None:
    saved, by_ranks, alone = (tmp_path / name for name in ("saved", "by_ranks", "alone"))
    for folder in (saved, by_ranks, alone):
        folder.mkdir()
    with ranks_of(large, 2) as (backend, pids):
        digests = backend.save(saved)
        for_ranks = Peak([*pids, os.getpid()])
        with for_ranks:
            backend.write_weights(by_ranks, torch.bfloat16, 200 * MIB)
    run = backend_run(large, {"name": "fsdp", "device": "cpu", "ranks": 2}, ("fsdp_backend",)).config
    for_one = Peak([os.getpid()])
    with for_one:
        write_weight_files(alone, read_weights(run, saved, digests), torch.bfloat16, 200 * MIB)
    embedding = 32000 * 1024 * 2
    # Half of it before the exchange, then gloo's own copy, the whole, and what the heap keeps.
    assert for_ranks.more < 4 * embedding
    # In fp32 as it was saved, then in the dtype of the file.
    assert for_one.more < 4.5 * embedding
    names = sorted(path.name for path in by_ranks.iterdir())
    assert len(names) > 3
    for name in names:
        assert filecmp.cmp(by_ranks / name, alone / name, shallow=False), name


def test_ranks_free_what_they_can_compute_anew_and_grow_no_further(large: Path) -> None:
    with ranks_of(large, 2) as (backend, pids):
        assert isinstance(backend, YieldsDevice)
        backend.update(*minibatch("packed", ParallelLayout()))
        held = max(map(anonymous_bytes, pids))
        shard = 4 * int(backend.facts()["parameters"]) / 2
        for keep_weights in (False, True, False):
            during = Peak(pids)
            with during:
                backend.yield_device(keep_weights=keep_weights)
                backend.take_device()
                # On CPU both memories are the host's: a tensor at a time is there twice, never all of them.
                assert during.more < shard / 4
        assert max(map(anonymous_bytes, pids)) < held + shard / 10


def test_weights_leave_before_the_first_forward_pass_and_come_back(tmp_path: Path) -> None:
    # Three ranks hold unequal shards, which FSDP2 pads in its first forward pass.
    model = write_tiny_model(tmp_path / "model", hidden_size=40, vocab_size=131)
    with ranks_of(model, 3) as (backend, _):
        assert isinstance(backend, YieldsDevice)
        weights = weights_of(backend)
        backend.yield_device(keep_weights=False)
        assert_weights_equal(weights_of(backend), weights)
        backend.take_device()
        loss = backend.update(*minibatch("packed", ParallelLayout(data=3)))["loss"]
    with ranks_of(model, 3) as (backend, _):
        assert backend.update(*minibatch("packed", ParallelLayout(data=3)))["loss"] == loss
