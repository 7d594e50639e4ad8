"""Ranks of the Megatron backend that fail, count, lose a checkpoint, or sum gradients in many small buckets.

Each function is a worker: it opens a rank in its process, and changes the code there. They are in one module, since
ranks of each module are forked from a process of their own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from failing_losses import fail
from fsdp_ranks import losing_files

from spurline_megatron_backend.open_rank import open_rank
from spurline_ranks.group import Place

RUNS_THAT_GO_WELL = 2
"""Forward passes that go well before a rank fails."""

SMALL_BUCKET = 2_000
"""Values of a bucket, after which another begins; a tiny model has some ten times as many."""

Change = Callable[[Place], None]


def _mutant(change: Change) -> Callable[..., Any]:
    @functools.wraps(change)
    def worker(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> Any:
        opened = open_rank(place, plain_run, total_updates)
        change(place)
        return opened

    return worker


@_mutant
def nothing_is_wrong_with_small_buckets(place: Place) -> None:
    """Sum gradients in many exchanges. Most begin before the backward pass has ended."""
    from spurline_megatron_backend import trained_model

    settings = trained_model.DistributedDataParallelConfig
    small: Any = functools.partial(settings, bucket_size=SMALL_BUCKET)
    trained_model.DistributedDataParallelConfig = small
    shards = trained_model._shards

    def counted(wrapped: Any, known: Any) -> Any:
        if place.rank == 0:
            # Later stages have one bucket.
            assert sum(len(buffer.buckets) for buffer in wrapped.buffers) > 2
        return shards(wrapped, known)

    trained_model._shards = counted


@_mutant
def fails(place: Place) -> None:
    """Fail in an update, while the other ranks go on until they wait. The environment variable `FAILING_RANK` says
    which rank and how: `1:kill`."""
    from spurline_megatron_backend.stages import StagedModel

    number, how = os.environ["FAILING_RANK"].split(":")
    run, calls = StagedModel.run, 0

    def failing(self: StagedModel, *arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > RUNS_THAT_GO_WELL:
            fail(how)
        run(self, *arguments, **named)

    if place.rank == int(number):
        StagedModel.run = failing


def counting(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> Any:
    """Its `counts` returns how often layers, and the attention inside of them, ran since the last call."""
    rank: Any = open_rank(place, plain_run, total_updates)
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from spurline_megatron_backend.core_attention import SegmentCoreAttention

    counts = {"layers": 0, "attention": 0}

    def count(kind: Any, name: str) -> None:
        forward = kind.forward

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return forward(self, *args, **kwargs)

        kind.forward = counted

    count(TransformerLayer, "layers")
    count(SegmentCoreAttention, "attention")

    def taken() -> dict[str, int]:
        result = dict(counts)
        counts.update(dict.fromkeys(counts, 0))
        return result

    rank.counts = taken
    return rank


def losing(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> Any:
    """A rank that loses a checkpoint while it reads it."""
    rank: Any = open_rank(place, plain_run, total_updates)
    rank._saved_model = losing_files(rank._saved_model)
    return rank
