"""Which prompt is drawn when: an endless order, a uid for each draw, and rows recognised again."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

import pytest

from spurline.config.run_config import DatasetConfig
from spurline.data.configs import SequentialOrderConfig, UniformOrderConfig
from spurline.data.orders.epochs import SequentialOrder, UniformOrder
from spurline.errors import DataError
from spurline.protocols.order import Order, SampleFacts
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_rl.draws import Draw, PromptDraws, SkippedRow
from spurline_rl.reward_adaptive import RewardAdaptiveOrder
from spurline_rl.training_configs import RewardAdaptiveOrderConfig
from spurline_rl.trajectory import Group, Trajectory, Turn


class Rows:
    def __init__(self, label: str, size: int, unreadable: Collection[int] = ()) -> None:
        self.label = label
        self._size = size
        self._unreadable = unreadable
        self.read: list[int] = []

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        self.read.append(row)
        if row in self._unreadable:
            raise DataError(f"{self.location(row)}: is no JSON.")
        return {"row": (self.label, row)}

    def location(self, row: int) -> str:
        return f"{self.label}.jsonl:{row + 1}"

    def fingerprint(self) -> str:
        return f"{self.label} {self._size}"


def uniform(facts: SampleFacts) -> Order:
    return UniformOrder(UniformOrderConfig(), samples=facts, seed=7)


def sequential(facts: SampleFacts) -> Order:
    return SequentialOrder(SequentialOrderConfig(), samples=facts, seed=7)


def draws_over(*sizes: int, weights: list[float] | None = None, **settings: Any) -> PromptDraws:
    weights = weights or [1.0] * len(sizes)
    datasets = [
        DatasetToTokenize(Rows("abc"[number], size), DatasetConfig(name="rows", weight=weight))
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return PromptDraws(datasets, uniform, per_step=2, **settings)


def test_each_epoch_draws_every_row_once_and_every_draw_has_its_own_uid() -> None:
    draws = draws_over(5, 3)
    taken = draws.take(0, 24)
    assert len({draw.uid for draw in taken}) == 24
    for epoch in range(3):
        rows = [draw.row["row"] for draw in taken[8 * epoch : 8 * epoch + 8]]
        assert sorted(rows) == [("a", n) for n in range(5)] + [("b", n) for n in range(3)]
    assert [draw.number for draw in taken] == list(range(24))
    for draw in taken:
        label, row = draw.row["row"]
        assert (draw.location, draw.uid) == (f"{label}.jsonl:{row + 1}", f"{label}:{row}@{draw.number}")


def test_the_order_does_not_depend_on_how_much_is_taken_at_a_time() -> None:
    draws = draws_over(6, 5)
    assert draws.take(0, 30) == [draw for start in range(0, 30, 3) for draw in draws.take(start, 3)]


def test_a_namespace_keeps_uids_apart() -> None:
    plain, other = draws_over(3).take(0, 3), draws_over(3, namespace="held-out ").take(0, 3)
    assert not {draw.uid for draw in plain} & {draw.uid for draw in other}


def draws_with_bad_rows(rows: Rows, on_bad_row: Literal["error", "skip"]) -> PromptDraws:
    config = DatasetConfig(name="rows", on_bad_row=on_bad_row)
    return PromptDraws([DatasetToTokenize(rows, config)], sequential, per_step=2)


def test_a_row_that_cannot_be_read_is_an_error_or_skipped_as_its_dataset_says() -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:2: is no JSON"):
        draws_with_bad_rows(Rows("a", 3, {1}), "error").take(0, 3)
    taken = draws_with_bad_rows(Rows("a", 3, {1}), "skip").take(0, 3)
    assert [type(draw) for draw in taken] == [Draw, SkippedRow, Draw]
    assert taken[1] == SkippedRow("a:1@1", 1, "a.jsonl:2: is no JSON.")


def test_skipped_rows_are_not_read_again_also_after_a_resume() -> None:
    rows = Rows("a", 4, {1})
    draws = draws_with_bad_rows(rows, "skip")
    draws.take(0, 4)
    draws.skip(SkippedRow("a:2@2", 2, "has no question"))
    for later in (draws, draws_with_bad_rows(rows, "skip")):
        later.load_state_dict(json.loads(json.dumps(draws.state_dict())))
        rows.read.clear()
        taken = later.take(4, 4)
        assert rows.read == [0, 3]
        assert taken[1:3] == [
            SkippedRow("a:1@5", 5, "a.jsonl:2: is no JSON."),
            SkippedRow("a:2@6", 6, "has no question"),
        ]


def test_when_every_row_is_skipped_drawing_ends_with_the_first_reason() -> None:
    draws = draws_with_bad_rows(Rows("a", 2, {0, 1}), "skip")
    draws.take(0, 3)
    with pytest.raises(DataError, match=r"All 2 rows were left out .*The first: a\.jsonl:1: is no JSON"):
        draws.take(3, 1)


def adaptive(facts: SampleFacts) -> Order:
    return RewardAdaptiveOrder(RewardAdaptiveOrderConfig(reward="right"), samples=facts, seed=7)


def adaptive_draws() -> PromptDraws:
    config = DatasetConfig(name="rows")
    return PromptDraws([DatasetToTokenize(Rows("a", 12), config)], adaptive, per_step=4)


def scored(draw: Draw | SkippedRow) -> Group:
    """A group of which some attempts are right, and whose weighted rewards say nothing of it."""
    assert isinstance(draw, Draw)
    right = [float(sample < draw.row["row"][1] % 3) for sample in range(2)]
    turn = Turn([1], [2], [1], rewards=[-5.0])  # type: ignore[arg-type]
    attempts = tuple(Trajectory(draw.uid, sample, (turn,), {"right": value}) for sample, value in enumerate(right))
    return Group(draw.uid, draw.number, attempts)


def test_draws_of_an_adaptive_order_are_the_same_rows_after_a_resume_and_depend_on_rewards() -> None:
    draws, unlearned = adaptive_draws(), adaptive_draws()
    for step in range(4):
        # The prompts of the next step are under way already.
        draws.take(4 * step + 4, 4)
        draws.observe(step + 1, [scored(draw) for draw in draws.take(4 * step, 4)])
    later = adaptive_draws()
    later.load_state_dict(draws.state_dict())
    assert later.take(0, 60) == draws.take(0, 60)
    assert unlearned.take(0, 60) != draws.take(0, 60)
