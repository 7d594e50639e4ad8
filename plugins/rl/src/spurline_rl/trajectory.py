"""The records of reinforcement learning: what was asked, generated, and how it was rewarded.

Place on the way: environment -> Trajectory -> Group (with rewards) -> returns -> advantages -> rollouts collator ->
TrainingBatch. Plain data and numpy; no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from spurline.data.token_store import as_array
from spurline.errors import DataError
from spurline_rl.flat_turns import RESPONSE_FIELDS, FlatTurns

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Turn:
    """One call of the model: the tokens it saw and the tokens it wrote.

    Attributes:
        prompt_ids: int32 [P], the whole context.
        response_ids: int32 [A], what the model produced, stop token included. Lists, arrays and tensors are accepted
            and converted once, here; tensors are detached and moved to the CPU.
        logprobs: float32 [A], of the distribution sampled from, or None.
        versions: int32 [A], weight version per token, or None.
        loss_mask: uint8 [A], 0 where a response token is not trained.
        rewards, advantages: float32 [A] or None.
        values, returns: float32 [A] or None; a critic's estimate before each token is written, and what it is trained
            on.
        routed_experts: int16 [P + A, layers, top_k] for mixture-of-experts replay, or None.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32] | None = None
    versions: NDArray[np.int32] | None = None
    rewards: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int16] | None = None
    finish_reason: FinishReason = "stop"

    def __post_init__(self) -> None:
        fields = self.__dict__
        for name, dtype in _DTYPES.items():
            values = fields[name]
            # Each stage makes the record again, mostly from arrays that are right already: those must cost nothing.
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
        sample: Which of the group's attempts this is, from 0.
        rewards: Named terms, before weights.
        info: Anything the environment wants to log.
        retries: Attempts that failed before this one.
    """

    uid: str
    sample: int
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    retries: int = 0


Record = TypeVar("Record", Turn, Trajectory)


def made_anew(record: Record, **fields: Any) -> Record:
    """`dataclasses.replace` for values that have the dtype of their field already, in a quarter of its time."""
    made = object.__new__(type(record))
    made.__dict__.update(record.__dict__, **fields)
    return made


@dataclass(frozen=True)
class Group:
    """All attempts at one prompt.

    Attributes:
        draw: Position of the prompt in the endless data order.
        columns: Numbers of the prompt's row, by `source.carry`.
        tags: Short values of that row, for people to look at. What is computed from the attempts is computed once: a
            group and its arrays are never changed, only replaced.
    """

    uid: str
    draw: int
    trajectories: tuple[Trajectory, ...]
    columns: Mapping[str, float] = field(default_factory=dict[str, float])
    tags: Mapping[str, str | float] = field(default_factory=dict[str, "str | float"])

    @cached_property
    def flat(self) -> FlatTurns:
        """The turns of all attempts in flat arrays."""
        return FlatTurns.of(self.trajectories)

    @cached_property
    def returns(self) -> NDArray[np.float64]:
        """The return of each attempt, float64 [n], read-only. Raises DataError for one that is not finite."""
        returns = np.array([trajectory_return(trajectory) for trajectory in self.trajectories], dtype=np.float64)
        returns.flags.writeable = False
        return returns

    @property
    def merged(self) -> Group:
        """The group with the turns of each attempt merged where they can be; the same one where none can."""
        return self._with_merged_turns or self

    @cached_property
    def _with_merged_turns(self) -> Group | None:
        """The group with merged turns, or None if no turns can be merged.

        It is not `self` then, since a reference cycle would keep the group until garbage collection.
        """
        merged = tuple(merge_turns(trajectory) for trajectory in self.trajectories)
        is_changed = any(new is not old for new, old in zip(merged, self.trajectories, strict=True))
        return replace(self, trajectories=merged) if is_changed else None


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    """Every trajectory, group after group."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def turns_of(groups: Iterable[Group]) -> list[Turn]:
    """Every turn of every trajectory, group after group."""
    return [turn for trajectory in trajectories_of(groups) for turn in trajectory.turns]


def with_turns(groups: Sequence[Group], turns: Sequence[Turn]) -> list[Group]:
    """The same groups with their turns replaced, given in the order of `turns_of`."""
    remaining = iter(turns)
    replaced = [
        replace(
            group,
            trajectories=tuple(
                made_anew(trajectory, turns=tuple(next(remaining) for _ in trajectory.turns))
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]
    assert next(remaining, None) is None, "more turns than the groups have"
    return replaced


def in_one_block(group: Group) -> Group:
    """The same group with the arrays of its turns as views of `group.flat`, so that they are in memory once."""
    flat = group.flat
    ends = np.cumsum(flat.num_response).tolist()
    places = zip(ends, flat.num_response.tolist(), np.cumsum(flat.lengths).tolist(), flat.lengths.tolist(), strict=True)
    turns: list[Turn] = []
    for turn, (end, num_response, stop, length) in zip(turns_of([group]), places, strict=True):
        fields: dict[str, Any] = {name: values[end - num_response : end] for name, values in flat.columns.items()}
        if flat.routed_experts is not None:
            fields["routed_experts"] = flat.routed_experts[stop - length : stop]
        prompt, response = flat.tokens[stop - length : stop - num_response], flat.tokens[stop - num_response : stop]
        turns.append(made_anew(turn, prompt_ids=prompt, response_ids=response, **fields))
    [block] = with_turns([group], turns)
    block.__dict__["flat"] = flat
    return block


_RELATIVE_TOLERANCE = 1e-6


def trajectory_return(trajectory: Trajectory) -> float:
    """Sum of the token rewards of all turns, undiscounted, in float64."""
    place = f"sample {trajectory.sample} of prompt '{trajectory.uid}'"
    total = 0.0
    for number, turn in enumerate(trajectory.turns):
        assert turn.rewards is not None, f"turn {number} of {place} was not scored"
        total += float(turn.rewards.sum(dtype=np.float64))
    if not np.isfinite(total):
        raise DataError(
            f"The rewards of {place} sum up to {total}. Make the reward function return finite numbers, or raise an "
            "exception for what it cannot judge."
        )
    return total


def group_returns(group: Group) -> NDArray[np.float64]:
    """One return per trajectory, float64 [n], read-only."""
    return group.returns


def are_equal(returns: NDArray[np.float64]) -> bool:
    """Return whether all returns are the same, up to the rounding of float32 rewards."""
    if len(returns) == 0:
        return True
    # Rewards that differ only in the order of their terms differ in the last bits; dividing those bits by their own
    # standard deviation would make advantages out of nothing.
    return bool(np.ptp(returns) <= _RELATIVE_TOLERANCE * np.abs(returns).max())


def has_equal_returns(group: Group) -> bool:
    """Return whether comparing the group's samples teaches nothing, because all did equally well.

    The filter and the group-relative advantages both ask `are_equal`: what is filtered has advantages of exactly 0.
    """
    return are_equal(group_returns(group))


def merge_turns(trajectory: Trajectory) -> Trajectory:
    """The same trajectory with a single turn, or as it is when some turn does not go on from the one before.

    One row holds it then instead of one per turn, so that shared context is computed once. Tokens that came between the
    model's turns (a user's or a tool's message) become response tokens without loss; advantages that walk along the
    response tokens are therefore computed before turns are merged. Per-token values of the tokens in between are 0;
    what some turn lacks, the merged one lacks. The finish reason is that of the last turn; the routed experts of a
    token are those that were chosen first, as what came after it was sampled with them.
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
    """Return whether the later turn's prompt begins with everything that the model had seen and written."""
    seen = np.concatenate([before.prompt_ids, before.response_ids])
    return np.array_equal(after.prompt_ids[: len(seen)], seen)


def _first_experts(turns: Sequence[Turn]) -> NDArray[np.int16] | None:
    """Return each token's experts from the first turn that has them, or None if a turn recorded none."""
    columns = [turn.routed_experts for turn in turns if turn.routed_experts is not None]
    if len(columns) < len(turns):
        return None
    first = columns[-1].copy()
    for column in reversed(columns[:-1]):
        known = (column >= 0).any(axis=(1, 2))
        first[: len(column)][known] = column[known]
    return first


def _join_column(turns: Sequence[Turn], name: str) -> NDArray[Any] | None:
    columns = [getattr(turn, name) for turn in turns]
    return None if any(column is None for column in columns) else _join(turns, columns)


def _join(turns: Sequence[Turn], columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The values of all turns, with zeros for the tokens between a turn's response and the next one."""
    parts = [columns[0]]
    for (before, after), column in zip(pairwise(turns), columns[1:], strict=True):
        between = len(after.prompt_ids) - len(before.prompt_ids) - len(before.response_ids)
        parts += [np.zeros(between, column.dtype), column]
    return np.concatenate(parts)
