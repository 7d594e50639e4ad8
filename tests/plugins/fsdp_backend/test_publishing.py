"""Weights of ranks reach engines without ever coming to the controller."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
from file_gpus import FileGpu
from recording_makers import choice_of, record
from torch import Tensor
from weight_takers import Taker, assert_published_again_and_again, make_sync

from spurline.config.loading import LoadedConfig
from spurline.errors import RankFailedError, RunFailedError
from spurline.protocols.collator import ParallelLayout
from spurline_async_rl.weights.cuda_ipc import read_handles
from spurline_async_rl.weights.shared_memory import MemoryReader
from spurline_models.machine import this_machine
from spurline_models.weight_buckets import MakerChoice, WeightBucket
from spurline_rl.testing.backend_cases import assert_weights_equal, minibatch, weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes


class KillsTheOwner(Taker):
    """Kills the process that made the first bucket, once it has it."""

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await super().load_bucket(bucket)
        os.kill(int(bucket.where["path"].split("/")[2]), signal.SIGKILL)


Opened = tuple[Any, ParallelLayout]


def run_of(model: Path) -> LoadedConfig:
    backend = {"name": "fsdp", "ranks": 2, "device": "cpu", "num_threads": 1}
    return backend_run(model, backend, ("fsdp_backend",))


@pytest.fixture(scope="module")
def ranks(spurline_tiny_model: Path) -> Iterator[Opened]:
    with opened(run_of(spurline_tiny_model)) as lent:
        yield lent


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_engines_get_the_weights_of_now_again_and_again_and_the_controller_none_of_them(
    ranks: Opened, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_published_again_and_again(ranks, transport, tmp_path, monkeypatch)


@pytest.mark.parametrize("made_by", ["owners", "all"])
def test_the_first_rank_or_all_make_the_buckets_in_the_dtype_that_is_asked_for(
    ranks: Opened, made_by: Literal["owners", "all"]
) -> None:
    backend, layout = ranks
    backend.update(*minibatch("packed", layout))
    expected = weights_of(backend)
    found = record(backend.weight_buckets(7, choice_of(made_by=made_by, dtype="bfloat16")))
    senders = ["0"] if made_by == "owners" else ["0", "1"]
    assert len(found.senders) > 2
    assert all(each == senders for each in found.senders)
    assert len(found.processes) == len(senders)
    assert found.told == {len(senders)}
    assert_weights_equal(found.weights, {name: value.bfloat16() for name, value in expected.items()})
    assert 2 * sum(found.sizes) == sum(value.nbytes for value in expected.values())


def test_handles_of_each_rank_s_memory_reach_an_engine_on_its_gpu(ranks: Opened, tmp_path: Path) -> None:
    backend, _ = ranks
    expected = weights_of(backend)
    settings = {"folder": str(tmp_path)}
    choice = MakerChoice("file_gpus:FileHandleMaker", settings, 20_000, "bfloat16", made_by="all")
    copies: list[dict[str, Tensor]] = [{}, {}]
    for bucket in backend.weight_buckets(4, choice):
        assert bucket.machine == this_machine()
        for rank, copy in enumerate(copies):
            read = read_handles(bucket, FileGpu(tmp_path, f"GPU-{rank}"))
            copy |= {name: value.clone() for name, value in read}
    for copy in copies:
        assert_weights_equal(copy, {name: value.bfloat16() for name, value in expected.items()})
    assert list(tmp_path.iterdir()) == []


def test_a_publish_goes_on_at_the_bucket_that_was_lost(ranks: Opened) -> None:
    backend, _ = ranks
    whole = record(backend.weight_buckets(8, choice_of()))
    assert whole.numbers == [*range(1, len(whole.numbers) + 1)]
    for first in (3, len(whole.numbers) + 1):
        rest = record(backend.weight_buckets(8, choice_of(), first))
        assert rest.numbers == whole.numbers[first - 1 :]
        assert rest.sizes == whole.sizes[first - 1 :]
        assert_weights_equal(rest.weights, {name: whole.weights[name] for name in rest.weights})


def test_a_rank_that_is_killed_between_two_buckets_ends_the_publish_and_its_memory(spurline_tiny_model: Path) -> None:
    sync, taker = make_sync("shared_memory", Path()), KillsTheOwner()
    with opened(run_of(spurline_tiny_model)) as (backend, _), closing(sync):
        with pytest.raises(RankFailedError, match=r"Rank 0.*SIGKILL"):
            asyncio.run(sync.publish(1, backend, [taker]))
        with pytest.raises(RunFailedError, match="cannot open"):
            MemoryReader().read(taker.buckets[0])
