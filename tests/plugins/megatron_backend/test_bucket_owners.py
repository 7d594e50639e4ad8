"""Ranks of a pipeline make buckets of what their own stage holds, and no weight passes another stage."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_layouts import on
from recording_makers import choice_of, record
from safetensors.torch import load_file

from spurline.protocols.ranks import RankRequest
from spurline_async_rl.weights.collective import BroadcastReader, CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig
from spurline_megatron_backend.grid import Grid
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_models.weight_buckets import MakerChoice, WeightBucket
from spurline_ranks.group import RankGroup, TimeLimits
from spurline_ranks.launch import open_ranks
from spurline_ranks.publishing import buckets_of_ranks
from spurline_rl.concurrency import in_thread
from spurline_rl.protocols.rollout_engine import TakesWeights
from spurline_rl.testing.backend_cases import assert_weights_equal, minibatch, weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

ROUND_BYTES = 9_000
"""What arrives at a time: less than a tensor of the models here."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    """Four that wait for something to hold."""
    request, limits = RankRequest(4, num_threads=1), TimeLimits(120.0, 60.0, 60.0)
    group = open_ranks(request, "megatron_gathering:GatheringWorker", (), limits)
    yield group
    group.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": write_tiny_model(folder / "dense", num_hidden_layers=4),
        "tied": write_tiny_model(folder / "tied", num_hidden_layers=4, tie_word_embeddings=True),
        "experts": write_tiny_moe_model(folder / "experts", num_hidden_layers=4),
    }


def hold(ranks: RankGroup, model: Path, grid: Grid) -> dict[str, torch.Tensor]:
    """What the ranks hold parts of from now on, under the names of files."""
    ranks.call("hold", str(model), asdict(grid), False, ROUND_BYTES)
    return load_file(model / "model.safetensors")


STAGES = [
    ("dense", Grid(4, pipeline=2)),
    ("tied", Grid(4, tensor=2, pipeline=2)),
    ("experts", Grid(4, pipeline=2, expert=2)),
]


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize(("model", "grid"), STAGES, ids=["stages", "tied-stages", "stages-of-experts"])
def test_each_stage_sends_its_own_weights_once_and_nothing_passes_another_stage(
    ranks: RankGroup, models: dict[str, Path], model: str, grid: Grid, dtype: str | None
) -> None:
    expected = hold(ranks, models[model], grid)
    if dtype is not None:
        expected = {name: value.to(getattr(torch, dtype)) for name, value in expected.items()}
    found = record(buckets_of_ranks(ranks, 1, choice_of(made_by="owners", dtype=dtype)))
    assert_weights_equal(found.weights, expected)
    assert {value.dtype for value in found.weights.values()} == {getattr(torch, dtype or "float32")}
    assert sum(found.sizes) == sum(value.nbytes for value in expected.values())
    # Each bucket from one sender, both have some, and two processes make them all.
    assert {tuple(senders) for senders in found.senders} == {("0",), ("1",)}
    assert len(found.processes) == 2
    assert found.told == {2}
    received = {
        (peer, rank)
        for rank, messages in enumerate(ranks.call("messages"))
        for kind, peer, _ in messages
        if kind == "irecv"
    }
    # The first rank of each stage is sent what the others of that stage hold, if they hold anything else.
    within = {(1, 0), (3, 2)}
    assert received == (set() if grid.tensor * grid.expert == 1 else within)


@pytest.mark.processes
def test_the_first_rank_alone_is_sent_everything_where_it_makes_all_buckets(
    ranks: RankGroup, models: dict[str, Path]
) -> None:
    expected = hold(ranks, models["dense"], Grid(4, pipeline=2))
    found = record(buckets_of_ranks(ranks, 1, choice_of()))
    assert_weights_equal(found.weights, expected)
    assert {tuple(senders) for senders in found.senders} == {("None",)}
    received, *others = ([size for kind, _, size in messages if kind == "irecv"] for messages in ranks.call("messages"))
    of_others = [
        name for name in expected if ".layers.2." in name or ".layers.3." in name or name.startswith("lm_head")
    ]
    assert sum(received) == sum(expected[name].nbytes for name in [*of_others, "model.norm.weight"])
    assert others == [[], [], []]


@pytest.mark.processes
def test_all_ranks_make_every_bucket_of_the_same_values_where_all_are_asked(
    ranks: RankGroup, models: dict[str, Path]
) -> None:
    expected = hold(ranks, models["experts"], Grid(4, pipeline=2, expert=2))
    found = record(buckets_of_ranks(ranks, 1, choice_of(made_by="all")))
    assert_weights_equal(found.weights, expected)
    assert all(senders == ["0", "1", "2", "3"] for senders in found.senders)
    assert len(found.processes) == 4
    assert found.told == {4}


@pytest.mark.processes
def test_a_publish_goes_on_with_the_bucket_that_was_lost_and_another_choice_makes_new_makers(
    ranks: RankGroup, models: dict[str, Path], tmp_path: Path
) -> None:
    expected = hold(ranks, models["dense"], Grid(4, pipeline=2))
    choice = choice_of(made_by="owners", folder=tmp_path)
    whole = record(buckets_of_ranks(ranks, 1, choice))
    assert whole.numbers == [*range(1, len(whole.numbers) + 1)]
    rest = record(buckets_of_ranks(ranks, 1, choice, first=3))
    assert rest.numbers == whole.numbers[2:]
    assert rest.senders == whole.senders[2:]
    missing = sum(whole.sizes[:2])
    assert sum(value.nbytes for value in rest.weights.values()) == sum(whole.sizes) - missing
    assert_weights_equal(rest.weights, {name: expected[name] for name in rest.weights})
    # The same choice has kept its makers; another one closes them first.
    next(buckets_of_ranks(ranks, 2, choice_of(made_by="all")))
    notes = [path.read_text().split() for path in tmp_path.iterdir()]
    assert len(notes) == 2
    for told in notes:
        assert Counter(told)["made"] == Counter(told)["closed"] == 1
        assert told[0] == "made"
        assert told[-2:] == ["taken", "closed"]


@pytest.mark.processes
@pytest.mark.parametrize("made_by", ["first", "owners", "all"])
def test_a_rank_that_makes_buckets_ahead_holds_two_of_them(
    ranks: RankGroup, models: dict[str, Path], made_by: str
) -> None:
    expected = hold(ranks, models["dense"], Grid(4, pipeline=2))
    largest = max(value.nbytes for value in expected.values())
    choice = choice_of(largest, made_by=made_by)
    keeping = asdict(choice) | {"maker": "recording_makers:PackingMaker", "settings": {}}
    peaks = ranks.call("peak_of_making", keeping)
    assert max(peaks) >= 1.5 * largest
    # Its packed bucket and the next one, and what is under way: a round of parts, or the one part of the embedding.
    assert max(peaks) <= 3 * largest
    made = {"first": {0}, "owners": {0, 2}, "all": {0, 1, 2, 3}}[made_by]
    assert all(peak <= largest for rank, peak in enumerate(peaks) if rank not in made)


class Stages:
    """As much of a backend of these ranks as a publish needs."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def weight_buckets(self, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
        return buckets_of_ranks(self._ranks, version, choice, first)


class Receiver(TakesWeights):
    """An engine of bf16 weights that takes part in broadcasts from this process."""

    transports = ("collective",)
    weights_dtype = "bfloat16"

    def __init__(self) -> None:
        self.taken: dict[str, torch.Tensor] = {}
        self.groups: set[str] = set()
        self.reader = BroadcastReader()

    async def begin_update(self, version: int) -> None:
        self.taken = {}

    async def load_bucket(self, bucket: WeightBucket) -> None:
        read = await in_thread(self.reader.read, replace(bucket, receiver="the engine"))
        self.taken |= {name: value.clone() for name, value in read}
        self.groups.add(bucket.where["meeting"]["group"])

    async def finish_update(self, version: int) -> None:
        self.reader.end_update()


@pytest.mark.processes
def test_every_stage_broadcasts_its_weights_to_the_engines_in_their_dtype(
    ranks: RankGroup, models: dict[str, Path]
) -> None:
    expected = hold(ranks, models["experts"], Grid(4, pipeline=2, expert=2))
    backend: Any = Stages(ranks)
    engine, sync = Receiver(), CollectiveSync(CollectiveSyncConfig())
    sync.max_bucket_bytes = 20_000
    with closing(sync), closing(engine.reader):
        for version in (1, 2):
            report = asyncio.run(sync.publish(version, backend, [engine]))
            assert_weights_equal(engine.taken, {name: value.bfloat16() for name, value in expected.items()})
            assert 2 * report.bytes_sent == sum(value.nbytes for value in expected.values())
        # One of each stage, kept from publish to publish.
        assert len(engine.groups) == 2
        # Its makers leave their groups.
        next(buckets_of_ranks(ranks, 3, choice_of()))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="starts four ranks of Megatron; SPURLINE_SOAK=1")
@pytest.mark.parametrize(
    ("write", "layout"),
    [
        (write_tiny_model, on(2, pipeline=2)),
        (write_tiny_moe_model, on(4, pipeline=2, expert=2)),
    ],
    ids=["stages", "stages-of-experts"],
)
def test_the_backend_publishes_the_weights_of_now_from_the_ranks_that_have_them(
    write: Any, layout: dict[str, Any], tmp_path: Path
) -> None:
    run = backend_run(write(tmp_path / "model", num_hidden_layers=2), layout, ("megatron_backend",))
    with opened(run) as (backend, asked):
        backend.update(*minibatch("packed", asked))
        expected = weights_of(backend)
        lent: Any = backend
        found = record(lent.weight_buckets(1, choice_of(made_by="owners", dtype="bfloat16")))
        assert {tuple(senders) for senders in found.senders} == {("0",), ("1",)}
        assert_weights_equal(found.weights, {name: value.bfloat16() for name, value in expected.items()})
        assert 2 * sum(found.sizes) == sum(value.nbytes for value in expected.values())
        rest = record(lent.weight_buckets(1, choice_of(made_by="owners", dtype="bfloat16"), first=3))
        assert rest.numbers == found.numbers[2:]
