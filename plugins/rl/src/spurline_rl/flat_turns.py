"""Turns in flat arrays: the one form that batches are laid out from.

Place on the way: a finished group -> FlatTurns, made once -> the blocks of a batch -> a collator that lays them out.
Thousands of short arrays become a few long ones here, on whatever thread the group finishes; laying a batch out is then
a matter of copying. Plain numpy; no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

RESPONSE_FIELDS: Mapping[str, np.dtype[Any]] = {
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "rewards": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "values": np.dtype(np.float32),
    "returns": np.dtype(np.float32),
}
"""Fields of a turn with one value per response token."""


class Attempt(Protocol):
    """An attempt whose turns are laid end to end: `spurline_rl.trajectory.Trajectory`."""

    @property
    def uid(self) -> str: ...

    @property
    def sample(self) -> int: ...

    @property
    def turns(self) -> Sequence[Any]: ...


@dataclass(frozen=True, eq=False)
class FlatTurns:
    """The n turns of m attempts, one after another.

    Attributes:
        uids, samples, numbers, finish_reasons: Of each turn the prompt's uid, the attempt, the turn's place in it, how
            it ended.
        attempt_turns: int64 [m], turns of each attempt.
        num_prompt, num_response: int64 [n], tokens of each turn.
        tokens: int32 [T], each turn's prompt and then its response.
        columns: Name of a field of Turn -> its values for all response tokens [A]; a field that some turn lacks is left
            out.
        routed_experts: int16 [T, layers, top_k], or None where some turn lacks them. All token arrays are read-only.
    """

    uids: Sequence[str]
    samples: NDArray[np.int32]
    numbers: NDArray[np.int32]
    finish_reasons: Sequence[str]
    attempt_turns: NDArray[np.int64]
    num_prompt: NDArray[np.int64]
    num_response: NDArray[np.int64]
    tokens: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]
    routed_experts: NDArray[np.int16] | None = None

    @classmethod
    def of(cls, trajectories: Sequence[Attempt]) -> FlatTurns:
        """The turns of these attempts. Raises AssertionError when a field has not one value per token."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        counts = [len(trajectory.turns) for trajectory in trajectories]
        prompts, responses = [turn.prompt_ids for turn in turns], [turn.response_ids for turn in turns]
        num_prompt, num_response = [*map(len, prompts)], [*map(len, responses)]
        both = [part for pair in zip(prompts, responses, strict=True) for part in pair]
        columns: dict[str, NDArray[Any]] = {}
        for name, dtype in RESPONSE_FIELDS.items():
            parts = _given([*map(attrgetter(name), turns)])
            if parts is not None:
                columns[name] = _joined(parts, num_response, dtype)
            elif name == "loss_mask":
                columns[name] = _join([], dtype)
        experts = _given([turn.routed_experts for turn in turns])
        if experts is not None:
            lengths = [prompt + response for prompt, response in zip(num_prompt, num_response, strict=True)]
            assert [*map(len, experts)] == lengths, "a turn has not the experts of each of its tokens"
        return cls(
            uids=[trajectory.uid for trajectory, count in zip(trajectories, counts, strict=True) for _ in range(count)],
            samples=np.repeat(np.array([trajectory.sample for trajectory in trajectories], np.int32), counts),
            numbers=np.array([number for count in counts for number in range(count)], np.int32),
            finish_reasons=[turn.finish_reason for turn in turns],
            attempt_turns=np.array(counts, np.int64),
            num_prompt=np.array(num_prompt, np.int64),
            num_response=np.array(num_response, np.int64),
            tokens=_join(both, np.dtype(np.int32)),
            columns=columns,
            routed_experts=None if experts is None else _join_experts(experts),
        )

    @classmethod
    def join(cls, blocks: Sequence[FlatTurns]) -> FlatTurns:
        """The turns of all blocks, one after another. What some block lacks is left out."""
        blocks = [block for block in blocks if len(block)] or [*blocks[:1]]
        if not blocks:
            return cls.of([])
        if len(blocks) == 1:
            return blocks[0]
        experts = _given([block.routed_experts for block in blocks])
        return cls(
            uids=[*chain.from_iterable(block.uids for block in blocks)],
            samples=_join([block.samples for block in blocks], np.dtype(np.int32)),
            numbers=_join([block.numbers for block in blocks], np.dtype(np.int32)),
            finish_reasons=[*chain.from_iterable(block.finish_reasons for block in blocks)],
            attempt_turns=_join([block.attempt_turns for block in blocks], np.dtype(np.int64)),
            num_prompt=_join([block.num_prompt for block in blocks], np.dtype(np.int64)),
            num_response=_join([block.num_response for block in blocks], np.dtype(np.int64)),
            tokens=_join([block.tokens for block in blocks], np.dtype(np.int32)),
            columns={
                name: _join([block.columns[name] for block in blocks], RESPONSE_FIELDS[name])
                for name in shared_columns(blocks)
            },
            routed_experts=None if experts is None else _join_experts(experts),
        )

    def __len__(self) -> int:
        """How many turns there are."""
        return len(self.num_prompt)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [n]: tokens of each turn, its prompt included."""
        return self.num_prompt + self.num_response

    @cached_property
    def trained_versions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Versions of weights in ascending order, and how many trained tokens came from each; the field `versions` is
        needed."""
        trained = self.columns["versions"][self.columns["loss_mask"] != 0].astype(np.int64)
        if not len(trained):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        oldest = trained.min()
        counts = np.bincount(trained - oldest)
        found = np.flatnonzero(counts)
        return found + oldest, counts[found]


def shared_columns(blocks: Sequence[FlatTurns]) -> list[str]:
    """Names of the columns that every block has."""
    # Nearly always all have the same.
    different = {tuple(block.columns) for block in blocks}
    return [name for name in RESPONSE_FIELDS if all(name in names for names in different)]


def _given(parts: list[NDArray[Any] | None]) -> list[NDArray[Any]] | None:
    """The same parts, or None where there are none or one lacks."""
    # Asking for types is several times faster than comparing each part.
    return cast("list[NDArray[Any]]", parts) if parts and type(None) not in set(map(type, parts)) else None


def _joined(parts: Sequence[Any], counts: list[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    assert [*map(len, parts)] == counts, "a column of a turn has not one value per token"
    return _join(parts, dtype)


def _join_experts(parts: Sequence[Any]) -> NDArray[np.int16]:
    return _join(parts, np.dtype(np.int16)).reshape(-1, *parts[0].shape[1:])


def _join(parts: Sequence[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """End to end, read-only, flat. Bytes: for many short arrays that takes half the time of `np.concatenate`."""
    try:
        return np.frombuffer(b"".join(parts), dtype)
    except TypeError:
        # An array with gaps, such as every second value of another one.
        values = np.concatenate([part.ravel() for part in parts]).astype(dtype, copy=False)
        values.flags.writeable = False
        return values
