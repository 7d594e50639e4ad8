"""Who is blamed for a call that failed, decided without processes: answers come from a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from spurline.errors import DataError, RankFailedError
from spurline_ranks.group import RankGroup, TimeLimits, Work
from spurline_ranks.outcomes import Died, Identity, Outcome, Raised, Value, packed

BROKEN = Raised.of(RuntimeError("Connection closed by peer"))
"""What a rank says whose exchange with another one breaks."""


class Scripted:
    """`RankProcesses` of three ranks. told: what comes, in order, at each wait. gone: what asking for others finds."""

    def __init__(self, told: Sequence[tuple[int, Value | Raised | Died]], gone: Mapping[int, Died]) -> None:
        self.identities = {rank: Identity(rank, 3, "node", 100 + rank) for rank in range(3)}
        started = [(rank, Value(None)) for rank in range(3)]
        self._told, self._found = [*started, *told], dict(gone)
        self.asked: list[Sequence[int]] = []
        self.ends = 0

    def send(self, method: str, common: bytes, own: Mapping[int, bytes]) -> None:
        pass

    def wait(self, timeout_s: float) -> Mapping[int, bytes | Died]:
        if not self._told:
            return {}
        rank, outcome = self._told.pop(0)
        return {rank: outcome if isinstance(outcome, Died) else packed(outcome)}

    def work(self, ranks: Sequence[int]) -> Mapping[int, Work]:
        return {}

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        return {}

    def gone(self, ranks: Sequence[int]) -> Mapping[int, Died]:
        self.asked.append(ranks)
        return self._found

    def end(self) -> None:
        self.ends += 1

    def close(self) -> None:
        pass


def group_of(processes: Scripted) -> RankGroup:
    return RankGroup(processes, TimeLimits(5.0, 5.0, 5.0))


def test_a_rank_that_is_gone_is_blamed_and_not_those_whose_exchange_with_it_broke() -> None:
    ranks = Scripted([(0, BROKEN), (1, BROKEN)], gone={2: Died("was lost")})
    with pytest.raises(RankFailedError, match=r"Rank 2 of 3 .* was lost during `step`"):
        group_of(ranks).call("step")
    assert ranks.asked == [[2]], "those that have told are there"
    assert ranks.ends == 1


def test_a_rank_whose_own_code_failed_is_blamed_where_all_others_are_there() -> None:
    ranks = Scripted([(0, BROKEN)], gone={})
    with pytest.raises(RankFailedError, match=r"Rank 0 of 3 .* failed during `step`: RuntimeError: Connection closed"):
        group_of(ranks).call("step")
    assert ranks.asked == [[1, 2]]


@pytest.mark.parametrize("outcome", [Raised.of(DataError("the cause")), Died("was killed")])
def test_nobody_is_looked_for_where_the_cause_is_told(outcome: Outcome) -> None:
    ranks = Scripted([(0, BROKEN), (1, outcome)], gone={})
    with pytest.raises((DataError, RankFailedError), match=r"the cause|Rank 1 of 3 .* was killed"):
        group_of(ranks).call("step")
    assert ranks.asked == []


def test_nobody_is_looked_for_when_all_have_answered() -> None:
    ranks = Scripted([(0, BROKEN), (1, Value(1)), (2, BROKEN)], gone={})
    with pytest.raises(RankFailedError, match="Rank 0 of 3"):
        group_of(ranks).call("step")
    assert ranks.asked == []


def test_a_rank_that_has_told_what_failed_before_it_died_is_blamed_for_what_it_told() -> None:
    own = Raised.of(ValueError("its own words"))
    ranks = Scripted([(1, own), (1, Died("was killed"))], gone={})
    with pytest.raises(RankFailedError, match=r"Rank 1 of 3 .* failed during `step`: ValueError: its own words"):
        group_of(ranks).call("step")
