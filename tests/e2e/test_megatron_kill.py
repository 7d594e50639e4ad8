"""kill -9 of the controller, of one rank, or of all of a Megatron run; it goes on in another layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rank_kills import Victim, WriteConfig, assert_same_to_rounding, finish, once_or_often, train_and_kill_each
from run_helpers import config_to_kill, on_ranks
from warm_runs import WarmRuns

LAYOUTS: tuple[dict[str, int], ...] = (
    {"ranks": 2, "pipeline": 2},
    {"ranks": 2, "tensor": 2},
    {"ranks": 2},
    {"ranks": 2, "context": 2},
    {"ranks": 1},
)


@once_or_often("rank")
def test_a_killed_run_goes_on_in_another_layout_with_the_metrics_of_the_uninterrupted_one(
    base_config: dict[str, Any],
    write_config: WriteConfig,
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
    victims: Sequence[Victim],
) -> None:
    config = config_to_kill(base_config, spurline_chat_file, 6 + 6 * len(victims))
    # Megatron models have no dropout.
    del config["model"]["config_overrides"]
    layouts = [on_ranks(config, backend="megatron", **LAYOUTS[number % len(LAYOUTS)]) for number in range(len(victims))]
    train_and_kill_each(warm_runs, write_config, layouts, victims)
    killed = finish(on_ranks(config, backend="megatron", tensor=2))
    assert_same_to_rounding(killed, finish(config | {"run_dir": str(tmp_path / "whole")}))
