"""Whole runs with each order of samples: what comes when, exact resume, and the same run asynchronously."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from async_runs import assert_equals_synchronous, asynchronous, comparable
from run_helpers import Config, Spurline, assert_pieces_equal_the_whole, assert_same_weights, train, write_rows

from spurline import load_config
from spurline.errors import ConfigError
from spurline.run.build import build_data
from spurline.run.checkpoints.state_files import read_state
from spurline_curricula.success_mixture import SuccessMixtureOrder
from spurline_rl.protocols.adaptive_order import AdaptiveOrder, ScoredDraw
from spurline_rl.reward_adaptive import RewardAdaptiveOrder

CURRICULUM = {"name": "curriculum", "column": "meta.difficulty"}
STAGED = {**CURRICULUM, "direction": "descending", "stages": 4}
ADAPTIVE = {"name": "reward_adaptive", "reward": "early", "floor": 0.01}
REPLAY = {
    "name": "success_mixture",
    "column": "meta.difficulty",
    "reward": "early",
    "replay": {"share": 0.5, "solved_at": 0.9, "most_prompts": 3},
}
MIXTURE = {"name": "mixture", "column": "meta.difficulty", "shares": {"0": 0.5}}


def difficulty(number: int) -> int:
    return 5 * number % 7


def chat_rows(count: int = 40) -> list[dict[str, Any]]:
    """Chat rows with a difficulty in `meta`; every fifth is too long."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {number} " + "again " * (60 if number % 5 == 3 else number % 4)},
                {"role": "assistant", "content": str(number) * 2},
            ],
            "meta": {"difficulty": difficulty(number)},
        }
        for number in range(count)
    ]


def pair_rows() -> list[dict[str, Any]]:
    """Pairs of which some have an answer that cannot be used."""
    return [
        {
            "prompt": row["messages"][0]["content"][:8],
            "chosen": "yes",
            "rejected": "no " * (200 if number % 5 == 3 else 1),
            "meta": row["meta"],
        }
        for number, row in enumerate(chat_rows())
    ]


@pytest.fixture
def sft_config(base_config: Config, tmp_path: Path) -> Config:
    """Nine samples a step of 32 usable ones, so that epochs end within batches."""
    base_config["data"] |= {"train": str(write_rows(tmp_path / "graded.jsonl", chat_rows())), "too_long": "drop"}
    return base_config | {"batch_size": 9, "collator": "padded"}


@pytest.fixture
def graded_rl_config(rl_config: Config, tmp_path: Path) -> Config:
    rows = [row for number, row in enumerate(chat_rows()) if number % 5 != 3][:10]
    rl_config["data"]["train"] = str(write_rows(tmp_path / "graded.jsonl", rows))
    rl_config["source"]["sampling"] = {"max_new_tokens": 3}
    rl_config["plugins"] = [*rl_config.get("plugins", []), "curricula"]
    return rl_config


def rows_by_step(config: Config, steps: int) -> list[list[int]]:
    """The rows of each batch, in order, as the run's source builds them."""
    with ExitStack() as stack:
        source = build_data(load_config(config), stack).source
        found = []
        for step in range(1, steps + 1):
            batch = source.build(step)
            uids = [str(uid) for uid in batch.segments["uid"].values]
            # Both answers of a pair are there.
            found.append([int(uid.rpartition(":")[2]) for uid in dict.fromkeys(uids)])
            batch.release()
        return found


def joined(steps: list[list[int]]) -> list[int]:
    return [row for rows in steps for row in rows]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_curriculum_rises_through_each_epoch_although_rows_were_dropped_and_tokens_cached(
    sft_config: Config, tmp_path: Path, suffix: str
) -> None:
    if suffix == "parquet":
        sft_config["data"]["train"] = str(tmp_path / "rows.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chat_rows()), sft_config["data"]["train"])
    sft_config["data"]["order"] = CURRICULUM
    usable = [number for number in range(40) if number % 5 != 3]
    plain = rows_by_step(sft_config, 8)
    for epoch in range(2):
        rows = joined(plain)[32 * epoch : 32 * epoch + 32]
        assert sorted(rows) == usable
        assert [difficulty(row) for row in rows] == sorted(map(difficulty, usable))
    fast = sft_config | {"plugins": ["collation_fast"], "tokenization": {"name": "parallel", "workers": 0}}
    # The second one reads its tokens from the cache that the first one wrote.
    assert [rows_by_step(fast, 8) for _ in range(2)] == [plain, plain]


def test_a_curriculum_of_pairs_rises_and_leaves_out_what_is_no_pair(sft_config: Config, tmp_path: Path) -> None:
    sft_config["data"] |= {"train": str(write_rows(tmp_path / "pairs.jsonl", pair_rows())), "order": CURRICULUM}
    config = sft_config | {"source": "preference", "batch_size": 8}
    rows = joined(rows_by_step(config, 4))
    assert sorted(rows) == [number for number in range(40) if number % 5 != 3]
    assert [difficulty(row) for row in rows] == sorted(map(difficulty, rows))
    assert rows_by_step(config | {"plugins": ["collation_fast"], "collator": "core/padded"}, 4) == [
        rows[start : start + 8] for start in range(0, 32, 8)
    ]


def test_length_grouping_pads_less(sft_config: Config, tmp_path: Path) -> None:
    rows = chat_rows(90)
    for number, row in enumerate(rows):
        row["messages"][1]["content"] = "x" * (1 + 37 * number % 60)
    sft_config["data"]["train"] = str(write_rows(tmp_path / "long.jsonl", rows))

    def fill(order: str) -> float:
        sft_config["data"]["order"] = order
        with ExitStack() as stack:
            source = build_data(load_config(sft_config), stack).source
            batches = [source.build(step) for step in range(1, 8)]
            return sum(b.num_tokens for b in batches) / sum(b.num_rows * b.length for b in batches)

    assert fill("length_grouped") > 0.9 > 0.8 > fill("uniform")


def name_of(order: str | Mapping[str, Any]) -> str:
    return order if isinstance(order, str) else "-".join(map(str, order.values()))


@pytest.mark.parametrize("order", ["sequential", {"name": "length_grouped", "pool_batches": 2}, MIXTURE], ids=name_of)
def test_fine_tuning_cut_in_pieces_equals_the_uninterrupted_run(sft_config: Config, tmp_path: Path, order: Any) -> None:
    sft_config |= {"plugins": ["curricula"]}
    sft_config["data"]["order"] = order
    assert_pieces_equal_the_whole(sft_config, tmp_path, [2, 4])


# The adaptive one too: without staleness, what it decides for a step depends on the steps before it alone.
@pytest.mark.parametrize("order", [STAGED, ADAPTIVE, REPLAY], ids=name_of)
def test_rollouts_cut_in_pieces_equal_the_uninterrupted_run_and_the_asynchronous_one_without_staleness(
    graded_rl_config: Config, order: Any
) -> None:
    graded_rl_config["data"]["order"] = order
    train(graded_rl_config, stop_after=3)
    pieces = train(graded_rl_config)
    whole = assert_equals_synchronous(asynchronous(graded_rl_config | {"run_dir": f"{pieces.run_dir}-whole"}))
    assert comparable(pieces) == comparable(whole)
    assert_same_weights(pieces, whole)


@pytest.mark.parametrize(("order", "kind"), [(ADAPTIVE, RewardAdaptiveOrder), (REPLAY, SuccessMixtureOrder)])
def test_an_adaptive_order_hears_of_every_group_also_while_groups_run_ahead(
    graded_rl_config: Config, monkeypatch: pytest.MonkeyPatch, order: Config, kind: type[AdaptiveOrder]
) -> None:
    heard: dict[int, list[int]] = {}
    observe = kind.observe

    def listen(self: AdaptiveOrder, step: int, draws: Sequence[ScoredDraw]) -> None:
        heard[step] = [draw.position for draw in draws]
        assert [draw.sample for draw in draws] == [int(self.positions(at, at + 1)[0]) for at in heard[step]]
        observe(self, step, draws)

    monkeypatch.setattr(kind, "observe", listen)
    graded_rl_config["data"]["order"] = order
    config = asynchronous(graded_rl_config, max_staleness=2, correction="tis")
    train(config, steps=3)
    checkpoint = train(config, steps=8).checkpoint
    assert checkpoint is not None
    state: Any = read_state(checkpoint / "components" / "source" / "async_rollouts")
    trained = state["ledger"]["states"]
    assert {step: np.flatnonzero(trained == step).tolist() for step in range(1, 9)} == heard


@pytest.mark.parametrize("source", ["sft", "rollouts"])
def test_a_plan_names_row_and_column_where_the_difficulty_is_missing(
    spurline: Spurline, request: pytest.FixtureRequest, tmp_path: Path, source: str
) -> None:
    config = request.getfixturevalue("sft_config" if source == "sft" else "graded_rl_config")
    rows = chat_rows(8)
    rows[2]["meta"] = {"dificulty": 3}
    config["data"] |= {"train": str(write_rows(tmp_path / "rows.jsonl", rows)), "order": CURRICULUM}
    code, out, err = spurline("plan", config)
    assert code == 2
    told = " ".join((out + err).split())
    assert "rows.jsonl:3: meta.difficulty is missing or null" in told
    assert (
        "Did you mean 'meta.dificulty'? Give every row a value, or name another column. The row has: messages, " in told
    )


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            "reward_adaptive",
            r"data\.order\.name is reward_adaptive, which learns from rewards, but source: sft has none",
        ),
        ("curriculum", r"data\.order\.column is required"),
        (
            {"column": "level"},
            r"data\.order\.column is not .* of 'uniform'\. It is a setting of curriculum: set `name: c",
        ),
        (True, r"data\.order must be an order: its name"),
        ("shuffled", r"data\.order is 'shuffled', but no order has that name.*Available: curriculum, length_grouped"),
    ],
)
def test_an_order_that_does_not_fit_is_refused_with_the_fix(sft_config: Config, order: Any, message: str) -> None:
    sft_config["data"]["order"] = order
    with pytest.raises(ConfigError, match=message):
        load_config(sft_config)


def test_shares_of_files_that_an_order_of_parts_would_not_keep_are_refused(sft_config: Config) -> None:
    whole = {"path": sft_config["data"]["train"], "share": 0.5}
    sft_config["data"] |= {"train": [whole, {**whole, "label": "again"}], "order": MIXTURE}
    with pytest.raises(ConfigError, match=r"data\.order\.name is mixture, which .* so a `share` in data\.train would"):
        load_config(sft_config | {"plugins": ["curricula"]})


def test_orders_that_rollouts_cannot_have_are_refused(graded_rl_config: Config) -> None:
    graded_rl_config["data"]["order"] = "length_grouped"
    with pytest.raises(ConfigError, match=r"data\.order\.name is length_grouped, which needs the length .*rollouts"):
        load_config(graded_rl_config)
    graded_rl_config["data"]["order"] = {**ADAPTIVE, "solved": -1}
    with pytest.raises(ConfigError, match=r"data\.order\.solved is -1, which is not above failed: 0"):
        load_config(graded_rl_config)
