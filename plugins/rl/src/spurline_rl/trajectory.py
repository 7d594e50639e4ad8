"""The records of reinforcement learning: prompts, responses and rewards, as objects and as flat arrays.

Data flow: environment -> Trajectory -> Group (with rewards) -> FlatTurns -> collator -> TrainingBatch.
This module uses numpy. It imports no torch and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from spurline.data.token_store import as_array
from spurline.errors import DataError

FinishReason = Literal["stop", "length", "abort", "error"]

RESPONSE_FIELDS: Mapping[str, np.dtype[Any]] = {
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "rewards": np.dtype(np.float32),
    "support": np.dtype(np.int32),
}
"""Fields of a turn with one value per response token, or in `support` one row."""


@dataclass(frozen=True)
class Turn:
    """One call of the model: the tokens it saw and the tokens it wrote. Arrays may be given as lists or tensors.

    Attributes:
        prompt_ids: int32 [P], the whole context.
        response_ids: int32 [A], the tokens that the model wrote, stop token included.
        logprobs: float32 [A], logprobs of the distribution from which the tokens were sampled, or None.
        versions: int32 [A], the version of the weights that wrote each token, or None.
        loss_mask: uint8 [A], 0 for response tokens that are not trained on.
        rewards: float32 [A] or None.
        finish_reason: That of `GenerationResult`, but `stop` if a lower limit ended the response than that of the run.
        routed_experts: int16 [P + A, layers, top_k], the experts of each token for router replay, or None.
        engines: Names of the engines that generated the tokens, in order; empty if they are unknown.
        support: int32 [A, K], ids of the tokens among which each token was sampled, padded with -1, or None.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32] | None = None
    versions: NDArray[np.int32] | None = None
    rewards: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int16] | None = None
    finish_reason: FinishReason = "stop"
    engines: tuple[str, ...] = ()
    support: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        fields = self.__dict__
        for name, dtype in _DTYPES.items():
            values = fields[name]
            # Turns are copied often, so this must be fast for arrays of the right type, which are the usual case.
            if values is None or (type(values) is np.ndarray and values.dtype is dtype):
                continue
            object.__setattr__(self, name, as_array(values, dtype))


_DTYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("prompt_ids", "response_ids"), np.dtype(np.int32)),
    **RESPONSE_FIELDS,
    "routed_experts": np.dtype(np.int16),
}


@dataclass(frozen=True)
class Trajectory:
    """One attempt at a prompt: its turns in order and its reward terms.

    Attributes:
        uid: The prompt's uid.
        sample: Number of the attempt in its group, from 0.
        rewards: Unweighted reward terms by name.
        info: Facts that the environment logs.
        retries: Attempts that failed before this one.
        counts: Whether advantages compare other attempts with this one.
    """

    uid: str
    sample: int
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    retries: int = 0
    counts: bool = True

    @property
    def environment(self) -> str:
        """Return the label of its environment in a run with several, and otherwise an empty text."""
        return str(self.info.get("environment", ""))


_Record = TypeVar("_Record", Turn, Trajectory)


def with_fields(record: _Record, **fields: Any) -> _Record:
    """Return a copy with new fields, four times faster than `dataclasses.replace`. Arrays are not converted."""
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, **fields)
    return copy


_ARRAYS: Mapping[str, np.dtype[Any]] = {
    **dict.fromkeys(("samples", "numbers", "prompts", "responses"), np.dtype(np.int32)),
    **dict.fromkeys(("attempt_turns", "num_prompt", "num_response"), np.dtype(np.int64)),
}


@dataclass(frozen=True, eq=False)
class FlatTurns:
    """The n turns of m attempts in flat arrays, from which collators make batches.

    Copying a few long arrays is much faster than copying thousands of short ones. All token arrays are read-only.
    Neighboring turns share a prompt, or its beginning; see `share_prompts`.

    Attributes:
        uids, samples, numbers, finish_reasons: One entry per turn: the prompt's uid, the attempt's number, the turn's
            number in the attempt, and how the turn ended.
        attempt_turns: int64 [m], turns of each attempt.
        num_prompt, num_response: int64 [n], tokens of each turn.
        prompts: int32 [P]. A turn's prompt is the `num_prompt` tokens from its entry of `prompt_starts` on.
        prompt_starts: int64 [n].
        responses: int32 [A], the response of each turn, one after another.
        columns: Arrays [A, ...] over all response tokens, by field name of Turn. A field is left out if any turn lacks
            it.
        routed_experts: int16 [T, layers, top_k], of the prompt and the response of each turn, or None if any turn lacks
            them.
    """

    uids: Sequence[str]
    samples: NDArray[np.int32]
    numbers: NDArray[np.int32]
    finish_reasons: Sequence[str]
    attempt_turns: NDArray[np.int64]
    num_prompt: NDArray[np.int64]
    num_response: NDArray[np.int64]
    prompts: NDArray[np.int32]
    prompt_starts: NDArray[np.int64]
    responses: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]
    routed_experts: NDArray[np.int16] | None = None

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> FlatTurns:
        """Join the turns of these attempts into flat arrays."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        counts = [len(trajectory.turns) for trajectory in trajectories]
        prompts, responses = [turn.prompt_ids for turn in turns], [turn.response_ids for turn in turns]
        num_prompt, num_response = [*map(len, prompts)], [*map(len, responses)]
        stored, prompt_starts = share_prompts(prompts)
        columns: dict[str, NDArray[Any]] = {}
        for name, dtype in RESPONSE_FIELDS.items():
            parts = _given([getattr(turn, name) for turn in turns])
            if parts is not None or name == "loss_mask":
                assert [*map(len, parts or ())] == num_response, f"a turn lacks some values of {name}"
                columns[name] = _join_parts(parts or (), dtype)
        experts = _given([turn.routed_experts for turn in turns])
        if experts is not None:
            lengths = [prompt + response for prompt, response in zip(num_prompt, num_response, strict=True)]
            assert [*map(len, experts)] == lengths, "a turn lacks the experts of some tokens"
        return cls(
            uids=[trajectory.uid for trajectory, count in zip(trajectories, counts, strict=True) for _ in range(count)],
            samples=np.repeat(np.array([trajectory.sample for trajectory in trajectories], np.int32), counts),
            numbers=np.array([number for count in counts for number in range(count)], np.int32),
            finish_reasons=[turn.finish_reason for turn in turns],
            attempt_turns=np.array(counts, np.int64),
            num_prompt=np.array(num_prompt, np.int64),
            num_response=np.array(num_response, np.int64),
            prompts=stored,
            prompt_starts=prompt_starts,
            responses=_join_parts(responses, np.dtype(np.int32)),
            columns=columns,
            routed_experts=None if experts is None else _join_parts(experts, np.dtype(np.int16)),
        )

    @classmethod
    def join(cls, blocks: Sequence[FlatTurns]) -> FlatTurns:
        """Join the turns of all blocks. A column is left out if any block lacks it."""
        blocks = [block for block in blocks if len(block)] or [*blocks[:1]]
        if not blocks:
            return cls.of([])
        if len(blocks) == 1:
            return blocks[0]
        experts = _given([block.routed_experts for block in blocks])
        moved = np.cumsum([0, *(len(block.prompts) for block in blocks[:-1])])
        return cls(
            uids=[uid for block in blocks for uid in block.uids],
            finish_reasons=[reason for block in blocks for reason in block.finish_reasons],
            prompt_starts=np.concatenate([block.prompt_starts + by for block, by in zip(blocks, moved, strict=True)]),
            columns={
                name: _join_parts([block.columns[name] for block in blocks], RESPONSE_FIELDS[name])
                for name in RESPONSE_FIELDS
                if all(name in block.columns for block in blocks)
            },
            routed_experts=None if experts is None else _join_parts(experts, np.dtype(np.int16)),
            **{name: _join_parts([getattr(block, name) for block in blocks], dtype) for name, dtype in _ARRAYS.items()},
        )

    def __len__(self) -> int:
        return len(self.num_prompt)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each turn, prompt included: int64 [n]."""
        return self.num_prompt + self.num_response

    def slices(self) -> list[tuple[slice, slice]]:
        """Return the places of each turn's prompt in `prompts`, and of its response in `responses` and `columns`."""
        prompt_stops, stops = self.prompt_starts + self.num_prompt, np.cumsum(self.num_response)
        bounds = (self.prompt_starts, prompt_stops, stops - self.num_response, stops)
        every = zip(*(each.tolist() for each in bounds), strict=True)
        return [(slice(first, last), slice(start, stop)) for first, last, start, stop in every]

    def tokens(self) -> NDArray[np.int32]:
        """Return the prompt and the response of each turn, int32 [T]. This repeats shared prompts."""
        prompts, responses = self.prompts, self.responses
        parts = [part for prompt, response in self.slices() for part in (prompts[prompt], responses[response])]
        return _join_parts(parts, np.dtype(np.int32))

    @cached_property
    def trained_versions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the weight versions in ascending order, and the number of trained tokens from each version.

        `columns` must have `versions`.
        """
        trained = self.columns["versions"][self.columns["loss_mask"] != 0].astype(np.int64)
        if not len(trained):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        oldest = trained.min()
        counts = np.bincount(trained - oldest)
        found = np.flatnonzero(counts)
        return found + oldest, counts[found]


@dataclass(frozen=True)
class Group:
    """All attempts at one prompt.

    A group and its arrays are never changed, so `flat`, `returns` and `merged` are computed once.

    Attributes:
        draw: Position of the prompt in the endless data order.
        columns: Numbers from the prompt's row, under the names in `source.carry`.
        tags: Short values from the prompt's row, for display.
        token_columns: Further columns [A] or [A, K] over the response tokens of all turns, which scorers have added.
        prompts: int32 [P] by role: the prompt with which this model scores the responses, instead of the policy's. All
            attempts must have one turn.
    """

    uid: str
    draw: int
    trajectories: tuple[Trajectory, ...]
    columns: Mapping[str, float] = field(default_factory=dict[str, float])
    tags: Mapping[str, str | float] = field(default_factory=dict[str, "str | float"])
    token_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, "NDArray[Any]"])
    prompts: Mapping[str, NDArray[np.int32]] = field(default_factory=dict[str, "NDArray[np.int32]"])

    @property
    def environment(self) -> str:
        """Return `Trajectory.environment`, which all attempts at a prompt have in common."""
        return self.trajectories[0].environment

    @cached_property
    def flat(self) -> FlatTurns:
        """Return the turns of all attempts in flat arrays."""
        return FlatTurns.of(self.trajectories)

    @cached_property
    def returns(self) -> NDArray[np.float64]:
        """Return the return of each attempt, float64 [n], read-only. Raises DataError if one is not finite."""
        returns = np.array([trajectory_return(trajectory) for trajectory in self.trajectories], dtype=np.float64)
        returns.flags.writeable = False
        return returns

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Return which attempts advantages compare, bool [n]."""
        return np.array([trajectory.counts for trajectory in self.trajectories], np.bool_)

    @cached_property
    def merged(self) -> Group:
        """Return the group after merging the turns of each attempt with `merge_turns`."""
        merged = replace(self, trajectories=tuple(merge_turns(trajectory) for trajectory in self.trajectories))
        if all(new is old for new, old in zip(merged.trajectories, self.trajectories, strict=True)):
            # `self` is not returned, because only the garbage collector can free a group that refers to itself.
            merged.__dict__["flat"] = self.flat
        return merged


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    """Return every trajectory, group after group."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def terms_of(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Return the values of each reward term, from the attempts that have it."""
    terms: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.rewards.items():
            terms.setdefault(name, []).append(float(value))
    return terms


def turns_of(groups: Iterable[Group]) -> list[Turn]:
    """Return every turn of every trajectory, group after group."""
    return [turn for trajectory in trajectories_of(groups) for turn in trajectory.turns]


def with_turns(groups: Sequence[Group], turns: Sequence[Turn]) -> list[Group]:
    """Return the groups with their turns replaced by `turns`, which must be in the order of `turns_of`."""
    remaining = iter(turns)
    replaced = [
        replace(
            group,
            trajectories=tuple(
                with_fields(trajectory, turns=tuple(next(remaining) for _ in trajectory.turns))
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]
    assert next(remaining, None) is None, "more turns than the groups have"
    return replaced


def in_one_block(group: Group) -> Group:
    """Return the group with turns whose arrays are views of `group.flat`. This frees the separate arrays."""
    flat = group.flat
    arrays = {"response_ids": flat.responses, **flat.columns}
    turns: list[Turn] = []
    end = 0
    for turn, (prompt, response) in zip(turns_of([group]), flat.slices(), strict=True):
        fields: dict[str, Any] = {name: values[response] for name, values in arrays.items()}
        if flat.routed_experts is not None:
            begin, end = end, end + len(turn.prompt_ids) + len(turn.response_ids)
            fields["routed_experts"] = flat.routed_experts[begin:end]
        turns.append(with_fields(turn, prompt_ids=flat.prompts[prompt], **fields))
    [block] = with_turns([group], turns)
    block.__dict__["flat"] = flat
    return block


_RELATIVE_TOLERANCE = 1e-6


def trajectory_return(trajectory: Trajectory) -> float:
    """Return the undiscounted sum of the token rewards of all turns."""
    total = 0.0
    for number, turn in enumerate(trajectory.turns):
        assert turn.rewards is not None, f"turn {number} of {_place(trajectory)} was not scored"
        total += float(turn.rewards.sum(dtype=np.float64))
    return finite_return(trajectory, total)


def finite_return(trajectory: Trajectory, total: float) -> float:
    """Return the sum of an attempt's rewards. Raises DataError if it is not finite."""
    if not np.isfinite(total):
        raise DataError(
            f"The rewards of {_place(trajectory)} sum up to {total}. The reward function must return finite numbers, "
            "or raise an exception for an answer that it cannot judge."
        )
    return total


def _place(trajectory: Trajectory) -> str:
    return f"sample {trajectory.sample} of prompt '{trajectory.uid}'"


def has_equal_returns(group: Group) -> bool:
    """Return whether all samples that count have the same return, so that group-relative advantages are 0."""
    return are_equal(group.returns[group.counted])


def are_equal(returns: NDArray[np.float64]) -> bool:
    """Return whether all returns are equal but for rounding.

    Sums of the same rewards in different orders can differ in their last bits. Division by the standard deviation would
    turn these differences into large advantages.
    """
    return bool(len(returns) == 0 or np.ptp(returns) <= _RELATIVE_TOLERANCE * np.abs(returns).max())


def merge_turns(trajectory: Trajectory) -> Trajectory:
    """Merge all turns into one. If any turn does not continue the previous turn, nothing is merged.

    The model then computes the shared context only once. Tokens between two responses (messages of users and tools)
    become response tokens without loss, with 0 in all other columns. Advantages that depend on the order of response
    tokens must therefore be computed before the merge. A field is left out if any turn lacks it. The merged turn has
    the finish reason of the last turn. A token keeps the experts of the first turn that recorded them, because the
    later tokens were sampled from the results of these experts.
    """
    turns = trajectory.turns
    if len(turns) < 2 or not all(_goes_on(before, after) for before, after in pairwise(turns)):
        return trajectory
    last = turns[-1]
    context = np.concatenate([last.prompt_ids, last.response_ids])
    first_prompt = len(turns[0].prompt_ids)
    merged = replace(
        last,
        prompt_ids=context[:first_prompt],
        response_ids=context[first_prompt:],
        routed_experts=_first_experts(turns),
        **{name: _join_column(turns, name) for name in RESPONSE_FIELDS},
    )
    return replace(trajectory, turns=(merged,))


def _goes_on(before: Turn, after: Turn) -> bool:
    """Return whether the later turn's prompt begins with the prompt and the response of the turn before."""
    seen = np.concatenate([before.prompt_ids, before.response_ids])
    return np.array_equal(after.prompt_ids[: len(seen)], seen)


def _first_experts(turns: Sequence[Turn]) -> NDArray[np.int16] | None:
    """Return each token's experts from the first turn that recorded them. If a turn has no experts, return None."""
    columns = [turn.routed_experts for turn in turns if turn.routed_experts is not None]
    if len(columns) < len(turns):
        return None
    first = columns[-1].copy()
    for column in reversed(columns[:-1]):
        known = (column >= 0).any(axis=(1, 2))
        first[: len(column)][known] = column[known]
    return first


def _join_column(turns: Sequence[Turn], name: str) -> NDArray[Any] | None:
    """Join the values of all turns, with zeros for the tokens between two responses."""
    columns = [getattr(turn, name) for turn in turns]
    if any(column is None for column in columns):
        return None
    parts = [columns[0]]
    for (before, after), column in zip(pairwise(turns), columns[1:], strict=True):
        between = len(after.prompt_ids) - len(before.prompt_ids) - len(before.response_ids)
        parts += [np.zeros((between, *column.shape[1:]), column.dtype), column]
    return np.concatenate(parts)


def share_prompts(prompts: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the prompts, most of them once, int32 [P], and the position of each prompt in them, int64 [n].

    A prompt is stored unless the prompt that was stored last begins with it. The last prompts come first, because the
    prompts of an attempt grow from turn to turn. So attempts with one turn share the prompt of their group, and the
    turns of one attempt share its longest prompt.
    """
    stored: list[bytes] = [b""]
    starts = np.empty(len(prompts), np.int64)
    start = stop = 0
    for number in range(len(prompts) - 1, -1, -1):
        prompt = prompts[number].astype(np.int32, copy=False).tobytes()
        if not stored[-1].startswith(prompt):
            stored.append(prompt)
            start, stop = stop, stop + len(prompts[number])
        starts[number] = start
    return np.frombuffer(b"".join(stored), np.int32), starts


def _given(parts: list[NDArray[Any] | None]) -> list[NDArray[Any]] | None:
    # This is several times faster than comparing each part with None.
    return cast("list[NDArray[Any]]", parts) if parts and type(None) not in set(map(type, parts)) else None


def _join_parts(parts: Sequence[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        # For many short arrays this takes half the time of `np.concatenate`.
        joined = np.frombuffer(b"".join(parts), dtype)
    except TypeError:
        # A part is not contiguous in memory.
        joined = np.concatenate([part.ravel() for part in parts]).astype(dtype, copy=False)
        joined.flags.writeable = False
    return joined.reshape(-1, *parts[0].shape[1:]) if parts else joined
