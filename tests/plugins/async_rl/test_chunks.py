"""Tokens that come in chunks are those that would have come one by one, with the versions they were written with."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_members import PROMPT, World
from scripted_members import Trainer, reference

from spurline.errors import RunFailedError
from spurline_async_rl.engines.child.main import Chunks
from spurline_async_rl.engines.child.packing import add_progress, pack_progress
from spurline_async_rl.engines.configs import PoolConfig
from spurline_async_rl.engines.progress import Progress
from spurline_rl.engines.in_process.response import Written
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling

LOGPROBS = st.floats(-100, 0, width=32)
CHUNKS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 200_000), LOGPROBS), max_size=5), st.integers(0, 3), st.booleans()),
    max_size=8,
)
"""Tokens with their logprobs, their version, and whether they come as arrays."""

Columns = list[list[Any]]
"""Token ids, logprobs, raw logprobs, versions."""


def filled(chunks: list[Any]) -> tuple[Progress, Columns]:
    """The same tokens in a Progress and in plain lists; raw logprobs are twice the others."""
    progress = Progress()
    plain: Columns = [[], [], [], []]
    for pairs, version, as_arrays in chunks:
        tokens, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
        raw = [2 * logprob for logprob in logprobs]
        for column, more in zip(plain, (tokens, logprobs, raw, [version] * len(tokens)), strict=True):
            column.extend(more)
        if as_arrays:
            # Every second value: arrays need not lie in one piece.
            wide = np.repeat(np.array([logprobs, raw], np.float32), 2, axis=1)
            progress.add(np.array(tokens, np.int32), wide[0, ::2], wide[1, ::2], version)
        else:
            progress.add(tokens, logprobs, raw, version)
    return progress, plain


def check_columns(progress: Progress, plain: Columns) -> None:
    raw = progress.raw_logprobs
    assert raw is not None
    arrays = (progress.token_ids, progress.logprobs, raw, progress.versions)
    assert [array.dtype for array in arrays] == [np.int32, np.float32, np.float32, np.int32]
    assert [array.tolist() for array in arrays] == plain
    assert len(progress) == len(plain[0])
    assert progress.last_token == (plain[0][-1] if plain[0] else None)
    assert all(one[0] != other[0] for one, other in zip(progress.version_runs, progress.version_runs[1:], strict=False))
    assert all(count > 0 for _, count in progress.version_runs)


@given(CHUNKS, CHUNKS, st.integers(0, 50))
def test_progress_is_what_lists_of_its_tokens_would_be(first: list[Any], second: list[Any], length: int) -> None:
    progress, plain = filled(first)
    check_columns(progress, plain)
    other, more = filled(second)
    progress.extend(other)
    for column, values in zip(plain, more, strict=True):
        column.extend(values)
    check_columns(progress, plain)
    check_columns(pickle.loads(pickle.dumps(progress)), plain)  # noqa: S301 (our own)
    begun = progress.token_ids
    progress.cut(length)
    for column in plain:
        del column[length:]
    check_columns(progress, plain)
    # It can go on while somebody has what came before.
    progress.add([1], [-1.0], [-1.0], 9)
    assert begun.tolist()[:length] == progress.token_ids.tolist()[:-1]


@given(CHUNKS, CHUNKS)
def test_progress_survives_a_message(before: list[Any], chunk: list[Any]) -> None:
    progress, plain = filled(before)
    written, more = filled(chunk)
    add_progress(progress, pack_progress(written))
    for column, values in zip(plain, more, strict=True):
        column.extend(values)
    check_columns(progress, plain)


def test_raw_logprobs_are_unknown_from_the_first_tokens_without_them_on() -> None:
    progress = Progress()
    progress.add([5], [-1.0], [-1.0], 0)
    progress.add([], [], None, 0)
    assert progress.raw_logprobs is not None
    unknown = Progress()
    unknown.add([6], [-2.0], None, 0)
    told = Progress()
    add_progress(told, pack_progress(unknown))
    progress.extend(told)
    progress.add([7], [-3.0], [-3.0], 0)
    assert progress.raw_logprobs is None
    assert progress.logprobs.tolist() == [-1.0, -2.0, -3.0]


def written(token: int) -> Written:
    return Written([token], [-1.0], [-1.0], [0], None)


def test_a_few_tokens_are_told_when_nothing_follows_them() -> None:
    async def main() -> list[tuple[int, list[int]]]:
        told: list[tuple[int, list[int]]] = []
        both = asyncio.Event()

        def tell(number: int, chunk: Progress, reason: Any) -> None:
            told.append((number, chunk.token_ids.tolist()))
            if len(told) == 2:
                both.set()

        chunks = Chunks(100, 0.01, tell)
        chunks.add(1, written(5))
        chunks.add(1, written(6))
        chunks.add(2, written(7))
        chunks.add(3, written(8))
        chunks.forget(3)
        assert not told
        await asyncio.wait_for(both.wait(), 30)
        both.clear()
        # Also those that come later.
        chunks.add(1, written(9))
        told.pop()
        await asyncio.wait_for(both.wait(), 30)
        return told

    assert asyncio.run(main()) == [(1, [5, 6]), (1, [9])]


def test_gathering_tokens_is_no_silence_that_an_engine_is_ended_for() -> None:
    limits = [PoolConfig(name="any", generate_timeout_s=limit).longest_wait_s for limit in (600.0, 2.0)]
    assert limits == [1.0, 0.5]


async def results_of(
    world: World, engines: int, requests: list[GenerationRequest], publishes: int, pauses: int
) -> list[GenerationResult]:
    pool = world.pool(engines)
    trainer = Trainer(pool)
    serving = asyncio.create_task(trainer.serve())

    async def disturb() -> None:
        for version in range(1, publishes + 1):
            await trainer.publish(version=version)
        for _ in range(pauses):
            await pool.pause()
            for member in world.members:
                assert not member.is_alive or member.told == member.engine.written, "a pause left tokens untold"
            await pool.resume()

    try:
        async with asyncio.timeout(20):
            await trainer.publish(version=0)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(disturb())
                writing = [tasks.create_task(pool.generate(request)) for request in requests]
            return [task.result() for task in writing]
    finally:
        await pool.close()
        serving.cancel()
        with suppress(asyncio.CancelledError, RunFailedError):
            await serving


@settings(max_examples=60)
@given(
    engines=st.integers(1, 3),
    chunk_tokens=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    deaths=st.sets(st.integers(0, 120), max_size=5),
    flushes=st.sets(st.integers(0, 120), max_size=10),
    publishes=st.integers(0, 3),
    pauses=st.integers(0, 3),
)
def test_chunks_bring_what_was_written_one_by_one_whoever_dies_and_whenever(
    engines: int,
    chunk_tokens: int,
    lengths: list[int],
    deaths: set[int],
    flushes: set[int],
    publishes: int,
    pauses: int,
) -> None:
    world = World(chunk_tokens, deaths, flushes)
    requests = [
        GenerationRequest([10 + number, 11], Sampling(max_new_tokens=length), number, f"train:{number}@0 sample 0")
        for number, length in enumerate(lengths)
    ]
    assert all(len(request.prompt_ids) == PROMPT for request in requests)
    results = asyncio.run(results_of(world, engines, requests, publishes, pauses))
    again: Counter[tuple[Any, str]] = Counter()
    for request, result in zip(requests, results, strict=True):
        tokens, reason = reference(request)
        assert (result.token_ids.tolist(), result.finish_reason) == (tokens, reason)
        assert result.raw_logprobs is not None
        assert result.logprobs.tolist() == result.raw_logprobs.tolist() == [-float(token) for token in tokens]
        # Whoever wrote a token last did so because nobody had it from those before.
        writers = [world.writes[request.name, index] for index in range(len(tokens))]
        assert result.versions.tolist() == [of_token[-1][1] for of_token in writers]
        again.update((member, request.name) for of_token in writers for member, _ in of_token[:-1])
    assert all(not member.is_alive for member, _ in again)
    assert max(again.values(), default=0) <= chunk_tokens, "an engine that died took more than a chunk with it"
