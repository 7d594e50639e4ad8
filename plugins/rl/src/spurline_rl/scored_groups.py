"""Scored groups with their numbers in flat arrays, from which advantages are computed. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spurline.data.token_store import joined
from spurline.errors import DataError, PluginError
from spurline_rl.trajectory import RESPONSE_FIELDS, Group, finite_return, trajectories_of


@dataclass(frozen=True, eq=False)
class ScoredGroups:
    """Scored groups, and columns with one number per response token of all their turns.

    The tokens are in the order of `turns_of(groups)`, and include tokens that are not trained on.

    Attributes:
        groups: The groups as the environment and the rewards made them. Their turns and their own `returns` lack what
            is in `computed`, so algorithms read `column` and `returns` of this object.
        computed: Columns [A] that were computed for this batch: `values` of a critic, and `rewards` after a KL penalty.
            They become read-only.
    """

    groups: Sequence[Group]
    computed: Mapping[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])

    def __post_init__(self) -> None:
        for values in self.computed.values():
            values.flags.writeable = False

    def column(self, name: str) -> NDArray[Any]:
        """Return a column [A], such as `rewards`, `loss_mask` or `values`.

        Raises:
            DataError: If a turn lacks it.
        """
        if name in self.computed:
            return self.computed[name]
        groups = [group for group in self.groups if group.trajectories]
        if groups and all(name in group.token_columns for group in groups):
            return np.concatenate([group.token_columns[name] for group in groups])
        for group in groups:
            if name not in group.flat.columns:
                raise _lacking(group, name)
        return joined([group.flat.columns[name] for group in groups], RESPONSE_FIELDS.get(name, np.float32))

    @cached_property
    def attempt_tokens(self) -> NDArray[np.int64]:
        """Return the number of response tokens of each attempt: int64 [m]."""
        ends = np.append(0, np.cumsum(flat_field(self.groups, "num_response")))
        return np.diff(ends[np.append(0, np.cumsum(flat_field(self.groups, "attempt_turns")))])

    @cached_property
    def returns(self) -> list[NDArray[np.float64]]:
        """Return the returns of each group's attempts: float64 [n] per group.

        Raises:
            DataError: If a return is not finite.
        """
        if "rewards" not in self.computed:
            return [group.returns for group in self.groups]
        turns, sizes = flat_field(self.groups, "attempt_turns"), [len(group.trajectories) for group in self.groups]
        of_turns = np.split(self.computed["rewards"], np.cumsum(flat_field(self.groups, "num_response"))[:-1])
        sums = iter(float(rewards.sum(dtype=np.float64)) for rewards in of_turns)
        attempts = zip(trajectories_of(self.groups), turns.tolist(), strict=True)
        returns = [finite_return(attempt, sum(next(sums) for _ in range(count))) for attempt, count in attempts]
        of_all = np.array(returns, np.float64)
        of_all.flags.writeable = False
        return np.split(of_all, np.cumsum(sizes)[:-1]) if sizes else []

    def cut(self, size: int) -> list[ScoredGroups]:
        """Return parts of `size` groups each. The last part may have fewer."""
        if size >= len(self.groups):
            return [self]
        tokens = np.cumsum([0, *(int(group.flat.num_response.sum()) for group in self.groups)]).tolist()
        parts: list[ScoredGroups] = []
        for start in range(0, len(self.groups), size):
            stop = min(start + size, len(self.groups))
            columns = {name: values[tokens[start] : tokens[stop]] for name, values in self.computed.items()}
            parts.append(ScoredGroups(self.groups[start:stop], columns))
        return parts

    def counted(self, least: int) -> tuple[ScoredGroups, NDArray[np.bool_]]:
        """Return the attempts that count, of groups with at least `least` of them, and which tokens are theirs.

        The mask is bool [A] over the tokens of this object.
        """
        kept = [group.counted & (group.counted.sum() >= least) for group in self.groups]
        tokens = np.repeat(joined(kept, np.bool_), self.attempt_tokens)
        ends = np.cumsum([int(group.flat.num_response.sum()) for group in self.groups])[:-1]
        groups = [
            replace(
                group,
                trajectories=tuple(compress(group.trajectories, chosen)),
                token_columns={name: values[mask] for name, values in group.token_columns.items()},
            )
            for group, chosen, mask in zip(self.groups, kept, np.split(tokens, ends), strict=True)
            if chosen.any()
        ]
        return ScoredGroups(groups, {name: values[tokens] for name, values in self.computed.items()}), tokens

    def spread(self, advantages: Sequence[NDArray[np.float64]]) -> dict[str, NDArray[np.float32]]:
        """Give all response tokens of an attempt its advantage. Returns the column `advantages` [A].

        Args:
            advantages: For each group, the advantages of its attempts: float64 [n].

        Raises:
            PluginError: If their numbers are not those of the attempts.
        """
        given, wanted = [*map(len, advantages)], [len(group.trajectories) for group in self.groups]
        if given != wanted:
            raise PluginError(
                f"Advantages for {given} attempts were given to groups of {wanted} attempts. Give each group a number "
                "for each of its attempts."
            )
        samples = joined([*advantages], np.float64).astype(np.float32)
        return {"advantages": np.repeat(samples, self.attempt_tokens)}


def flat_field(groups: Sequence[Group], name: str) -> NDArray[np.int64]:
    """Return a field of `FlatTurns` for all turns or attempts of the groups, one after another."""
    return joined([getattr(group.flat, name) for group in groups], np.int64)


def _lacking(group: Group, name: str) -> DataError:
    sample, number = next(
        (attempt.sample, number)
        for attempt in group.trajectories
        for number, turn in enumerate(attempt.turns)
        if getattr(turn, name, None) is None
    )
    return DataError(
        f"Turn {number} of sample {sample} of prompt '{group.uid}' has no {name}. Choose an `advantage` that does not "
        "need them, or a `source` that provides them."
    )
