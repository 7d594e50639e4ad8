"""Who is blamed for a call that failed, decided without processes: answers come from a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from spurline.errors import DataError, RankFailedError
from spurline_ranks.group import RankGroup, TimeLimits
from spurline_ranks.outcomes import Died, Identity, Outcome, Raised, Value

BROKEN = Raised.of(RuntimeError("Connection closed by peer"))
"""What a rank says whose exchange with another one breaks."""


class Scripted(RankGroup):
    """told: what comes, in order, one part at each wait. gone: what asking for the others finds."""

    _grace_s: ClassVar[float] = 0.05

    def __init__(self, told: Sequence[Mapping[int, Outcome]], gone: Mapping[int, Died]) -> None:
        super().__init__(3, TimeLimits(5.0, 5.0, 5.0))
        self._told, self._found = list(told), dict(gone)
        self.asked: list[Sequence[int]] = []
        self.ends = 0

    def _send(self, method: str, common: tuple[Any, ...], per_rank: Sequence[Any] | None) -> None:
        pass

    def _wait(self, missing: Sequence[int], timeout_s: float) -> dict[int, Outcome]:
        told = dict(self._told.pop(0)) if self._told else {}
        assert set(told) <= set(missing)
        return told

    def _gone(self, ranks: Sequence[int]) -> Mapping[int, Died]:
        self.asked.append(ranks)
        return self._found

    def _identity(self, rank: int) -> Identity:
        return Identity(rank, self.size, "node", 100 + rank)

    def _doing(self, missing: Sequence[int]) -> Mapping[int, str]:
        return {}

    def _stacks(self, missing: Sequence[int]) -> Mapping[int, str]:
        return {}

    def _end(self) -> None:
        self.ends += 1

    def _release(self) -> None:
        pass


def test_a_rank_that_is_gone_is_blamed_and_not_those_whose_exchange_with_it_broke() -> None:
    ranks = Scripted([{0: BROKEN}, {1: BROKEN}], gone={2: Died("was lost")})
    with pytest.raises(RankFailedError, match=r"Rank 2 of 3 .* was lost during `step`"):
        ranks.call("step")
    assert ranks.asked == [[2]], "those that have told are there"
    assert ranks.ends == 1


def test_a_rank_whose_own_code_failed_is_blamed_where_all_others_are_there() -> None:
    ranks = Scripted([{0: BROKEN}], gone={})
    with pytest.raises(RankFailedError, match=r"Rank 0 of 3 .* failed during `step`: RuntimeError: Connection closed"):
        ranks.call("step")
    assert ranks.asked == [[1, 2]]


@pytest.mark.parametrize("outcome", [Raised.of(DataError("the cause")), Died("was killed")])
def test_nobody_is_looked_for_where_the_cause_is_told(outcome: Outcome) -> None:
    ranks = Scripted([{0: BROKEN}, {1: outcome}], gone={})
    with pytest.raises((DataError, RankFailedError), match=r"the cause|Rank 1 of 3 .* was killed"):
        ranks.call("step")
    assert ranks.asked == []


def test_nobody_is_looked_for_when_all_have_answered() -> None:
    ranks = Scripted([{0: BROKEN, 1: Value(1)}, {2: BROKEN}], gone={})
    with pytest.raises(RankFailedError, match="Rank 0 of 3"):
        ranks.call("step")
    assert ranks.asked == []
