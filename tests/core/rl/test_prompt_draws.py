"""Which prompt is drawn when: an endless order, a uid for each draw, and rows recognised again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from spurline.builtin.rollouts.draws import PromptDraws
from spurline.config.run_config import DatasetConfig
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize


class Rows:
    def __init__(self, label: str, size: int) -> None:
        self.label = label
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return {"row": (self.label, row)}

    def location(self, row: int) -> str:
        return f"{self.label}.jsonl:{row + 1}"

    def fingerprint(self) -> str:
        return f"{self.label} {self._size}"


def draws_over(*sizes: int, weights: list[float] | None = None, **settings: Any) -> PromptDraws:
    weights = weights or [1.0] * len(sizes)
    datasets = [
        DatasetToTokenize(Rows("abc"[number], size), DatasetConfig(name="rows", weight=weight))
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return PromptDraws(datasets, 7, **{"shuffle": True, **settings})


def test_each_epoch_draws_every_row_once_and_every_draw_has_its_own_uid() -> None:
    draws = draws_over(5, 3)
    taken = draws.take(0, 24)
    assert len({draw.uid for draw in taken}) == 24
    for epoch in range(3):
        rows = [draw.row["row"] for draw in taken[8 * epoch : 8 * epoch + 8]]
        assert sorted(rows) == [("a", n) for n in range(5)] + [("b", n) for n in range(3)]
    assert [draw.number for draw in taken] == list(range(24))


def test_a_draw_says_where_its_row_is() -> None:
    for draw in draws_over(4, 2).take(0, 6):
        label, row = draw.row["row"]
        assert (draw.location, draw.uid) == (f"{label}.jsonl:{row + 1}", f"{label}:{row}@{draw.number}")


def test_the_order_does_not_depend_on_how_much_is_taken_at_a_time() -> None:
    draws = draws_over(6, 5)
    assert draws.take(0, 30) == [draw for start in range(0, 30, 3) for draw in draws.take(start, 3)]


def test_weights_set_how_often_a_dataset_is_drawn() -> None:
    draws = draws_over(4, 4, weights=[2.0, 0.5])
    assert draws.prompts_per_epoch == 10
    labels = [draw.row["row"][0] for draw in draws.take(0, 10)]
    assert (labels.count("a"), labels.count("b")) == (8, 2)


def test_a_namespace_keeps_uids_apart() -> None:
    plain, other = draws_over(3).take(0, 3), draws_over(3, namespace="held-out ").take(0, 3)
    assert not {draw.uid for draw in plain} & {draw.uid for draw in other}


def test_a_changed_dataset_has_another_fingerprint() -> None:
    assert draws_over(3, 4).fingerprint() == draws_over(3, 4).fingerprint()
    assert draws_over(3, 4).fingerprint() != draws_over(3, 5).fingerprint()


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="b has no rows"):
        draws_over(2, 0)
