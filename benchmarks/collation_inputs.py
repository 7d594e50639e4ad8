"""Make the data of the collation benchmark, and its baselines: per-row numpy slices, and per-token loops.

The seeds are 0 for lengths, 1 for samples, and 2 for rollouts. The store is 20 times as large as the batch, and the
samples of the batch are scattered in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spurline.data.batch import TOKEN_COLUMNS, Ragged, TrainingBatch
from spurline.data.collators.layout import layout_info
from spurline.data.collators.packing import straggler_factor
from spurline.data.token_store import TokenStore, TokenView
from spurline_rl.trajectory import Trajectory, Turn

BATCH = 1024
STORE_TIMES = 20
FIRST_TOKEN, LAST_TOKEN = 256, 151935


@dataclass(frozen=True)
class Inputs:
    """One batch in all forms: as a view of a store, as lists, and as trajectories."""

    capacity: int
    lengths: NDArray[np.int64]
    view: TokenView
    lists: list[tuple[list[int], list[int]]]
    trajectories: list[Trajectory]
    turn_lists: list[dict[str, list[Any]]]


@dataclass(frozen=True)
class DataSet:
    """A data set. `draw` is a function that draws lengths, int64 [count]."""

    capacity: int
    draw: Callable[[np.random.Generator, int], NDArray[np.int64]]

    def make(self) -> Inputs:
        lengths = self.draw(np.random.default_rng(0), STORE_TIMES * BATCH)
        random = np.random.default_rng(1)
        place = random.permutation(len(lengths))
        stored = np.empty_like(lengths)
        stored[place] = lengths
        store = _store(random, stored)
        view = store.view(place[:BATCH])
        trajectories = _trajectories(np.random.default_rng(2), lengths[:BATCH])
        return Inputs(
            self.capacity,
            lengths[:BATCH],
            view,
            [(view.tokens(i).tolist(), view.loss_mask(i).tolist()) for i in range(BATCH)],
            trajectories,
            [_as_lists(trajectory.turns[0]) for trajectory in trajectories],
        )


def _lognormal(random: np.random.Generator, count: int) -> NDArray[np.int64]:
    mean, sigma = 500, 0.9
    drawn = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.round(drawn), 16, 4096).astype(np.int64)


DATA_SETS = {
    "D1": DataSet(8192, _lognormal),
    "D2": DataSet(1024, lambda random, count: random.integers(16, 201, count)),
}


def _store(random: np.random.Generator, lengths: NDArray[np.int64]) -> TokenStore:
    total, count = int(lengths.sum()), len(lengths)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    responses = np.round(lengths * random.uniform(0.2, 0.8, count)).astype(np.int64)
    from_end = np.repeat(offsets[1:], lengths) - np.arange(total)
    return TokenStore(
        tokens=random.integers(FIRST_TOKEN, LAST_TOKEN + 1, total).astype(np.int32),
        loss_mask=(from_end <= np.repeat(responses, lengths)).astype(np.uint8),
        offsets=offsets,
        source=np.zeros(count, np.int32),
        row=np.arange(count, dtype=np.int64),
        labels=("bench",),
    )


def _trajectories(random: np.random.Generator, lengths: NDArray[np.int64]) -> list[Trajectory]:
    return [
        Trajectory(f"prompt-{number // 8}", number % 8, (_turn(random, int(length)),))
        for number, length in enumerate(lengths)
    ]


def _turn(random: np.random.Generator, length: int) -> Turn:
    response = max(1, round(length * random.uniform(0.2, 0.8)))
    ids = random.integers(FIRST_TOKEN, LAST_TOKEN + 1, length).astype(np.int32)
    return Turn(
        prompt_ids=ids[: length - response].copy(),
        response_ids=ids[length - response :].copy(),
        loss_mask=np.ones(response, np.uint8),
        logprobs=random.standard_normal(response).astype(np.float32),
        rewards=random.standard_normal(response).astype(np.float32),
        versions=random.integers(0, 3, response).astype(np.int32),
    )


def _as_lists(turn: Turn) -> dict[str, list[Any]]:
    names = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "rewards", "versions")
    return {name: getattr(turn, name).tolist() for name in names}


def row_slices(inputs: Inputs, rows: Sequence[Sequence[int]], length: int, pad: int) -> TrainingBatch:
    """Make padded and packed batches from lists, with one slice assignment for each sample and column."""
    columns = _fresh(len(rows), length, pad)
    ascending = np.arange(length)
    for r, row in enumerate(rows):
        start = 0
        for number, position in enumerate(row, start=1):
            tokens, mask = inputs.lists[position]
            stop = start + len(tokens)
            columns["input_ids"][r, start:stop] = tokens
            columns["segment_ids"][r, start:stop] = number
            columns["position_ids"][r, start:stop] = ascending[: len(tokens)]
            columns["loss_weights"][r, start + 1 : stop] = mask[1:]
            start = stop
    return _finished(inputs, rows, columns)


def _finished(inputs: Inputs, rows: Sequence[Sequence[int]], columns: dict[str, NDArray[Any]]) -> TrainingBatch:
    positions = np.array([position for row in rows for position in row], np.int64)
    used = [sum(len(inputs.lists[position][0]) for position in row) for row in rows]
    info = {"packing/straggler": straggler_factor(used, 8)}
    uids = [inputs.view.uid(position) for position in positions.tolist()]
    nothing = np.zeros(len(positions), np.int32)
    return _batch(columns, [len(row) for row in rows], uids, nothing, inputs.lengths[positions], info)


def row_slices_rollouts(inputs: Inputs, pad: int) -> TrainingBatch:
    """Make a batch of rollouts, with one turn in each row, in the same way."""
    length = int(inputs.lengths.max())
    columns = _fresh_rollouts(length, pad)
    ascending = np.arange(length)
    for r, turn in enumerate(inputs.turn_lists):
        prompt, stop = len(turn["prompt_ids"]), int(inputs.lengths[r])
        columns["input_ids"][r, :prompt] = turn["prompt_ids"]
        columns["input_ids"][r, prompt:stop] = turn["response_ids"]
        columns["segment_ids"][r, :stop] = 1
        columns["position_ids"][r, :stop] = ascending[:stop]
        columns["loss_weights"][r, prompt:stop] = turn["loss_mask"]
        columns["rollout_logprobs"][r, prompt:stop] = turn["logprobs"]
        columns["rewards"][r, prompt:stop] = turn["rewards"]
        columns["token_versions"][r, prompt:stop] = turn["versions"]
    return _finished_rollouts(inputs, columns)


def _finished_rollouts(inputs: Inputs, columns: dict[str, NDArray[Any]]) -> TrainingBatch:
    uids = [trajectory.uid for trajectory in inputs.trajectories]
    samples = np.array([trajectory.sample for trajectory in inputs.trajectories], np.int32)
    return _batch(columns, [1] * BATCH, uids, samples, inputs.lengths, {})


def token_loops(inputs: Inputs, rows: Sequence[Sequence[int]], length: int, pad: int) -> TrainingBatch:
    """Make padded and packed batches from the store's arrays, with one Python statement for each token and column."""
    columns = _fresh(len(rows), length, pad)
    ids, numbers, places, weights = (columns[name] for name in TOKEN_COLUMNS)
    for r, row in enumerate(rows):
        start = 0
        for number, position in enumerate(row, start=1):
            tokens, mask = inputs.view.tokens(position), inputs.view.loss_mask(position)
            for offset in range(len(tokens)):
                ids[r, start + offset] = tokens[offset]
                numbers[r, start + offset] = number
                places[r, start + offset] = offset
                weights[r, start + offset] = mask[offset] if offset else 0
            start += len(tokens)
    return _finished(inputs, rows, columns)


def token_loops_rollouts(inputs: Inputs, pad: int) -> TrainingBatch:
    """Make a batch of rollouts, with one turn in each row, in the same way."""
    length = int(inputs.lengths.max())
    columns = _fresh_rollouts(length, pad)
    ids, numbers, places, weights = (columns[name] for name in TOKEN_COLUMNS)
    for r, trajectory in enumerate(inputs.trajectories):
        turn: Any = trajectory.turns[0]
        prompt = len(turn.prompt_ids)
        for offset in range(prompt + len(turn.response_ids)):
            numbers[r, offset] = 1
            places[r, offset] = offset
            if offset < prompt:
                ids[r, offset] = turn.prompt_ids[offset]
                continue
            ids[r, offset] = turn.response_ids[offset - prompt]
            weights[r, offset] = turn.loss_mask[offset - prompt]
            columns["rollout_logprobs"][r, offset] = turn.logprobs[offset - prompt]
            columns["rewards"][r, offset] = turn.rewards[offset - prompt]
            columns["token_versions"][r, offset] = turn.versions[offset - prompt]
    return _finished_rollouts(inputs, columns)


def _fresh(num_rows: int, length: int, pad: int) -> dict[str, NDArray[Any]]:
    shape = (num_rows, length)
    columns: dict[str, NDArray[Any]] = {"input_ids": np.full(shape, pad, np.int32)}
    for name, dtype in TOKEN_COLUMNS.items():
        if name != "input_ids":
            columns[name] = np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype)
    return columns


def _fresh_rollouts(length: int, pad: int) -> dict[str, NDArray[Any]]:
    columns = _fresh(BATCH, length, pad)
    for name, dtype in (("rollout_logprobs", "f4"), ("rewards", "f4"), ("token_versions", "i4")):
        columns[name] = np.zeros((BATCH, length), dtype)
    return columns


def _batch(
    columns: dict[str, NDArray[Any]],
    counts: Sequence[int],
    uids: list[str],
    samples: NDArray[np.int32],
    lengths: NDArray[np.int64],
    info: dict[str, float],
) -> TrainingBatch:
    """Return the arrays as a TrainingBatch with its metadata."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    num_rows, length = columns["input_ids"].shape
    return TrainingBatch(
        tokens={name: torch.from_numpy(column) for name, column in columns.items()},
        segments={
            "uid": Ragged(np.array(uids, object), offsets),
            "sample": Ragged(samples, offsets),
            "turn": Ragged(np.zeros(len(uids), np.int32), offsets),
            "length": Ragged(lengths.astype(np.int32), offsets),
        },
        unit_ids=torch.arange(num_rows),
        is_padding_row=torch.tensor([count == 0 for count in counts]),
        info={**layout_info(int(lengths.sum()), num_rows, length), **info},
    )
