"""kill -9 of the controller, of one rank, or of all, at random instants; the same command goes on, also on others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rank_kills import Victim, WriteConfig, assert_same_to_rounding, finish, once_or_often, train_and_kill_each
from run_helpers import config_to_kill, on_ranks
from warm_runs import WarmRuns


@once_or_often("rank")
def test_a_killed_run_goes_on_with_the_metrics_of_the_uninterrupted_one_bit_for_bit(
    base_config: dict[str, Any],
    write_config: WriteConfig,
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
    victims: Sequence[Victim],
) -> None:
    config = on_ranks(config_to_kill(base_config, spurline_chat_file, 6 + 6 * len(victims)))
    train_and_kill_each(warm_runs, write_config, [config] * len(victims), victims)
    assert finish(config) == finish(config | {"run_dir": str(tmp_path / "whole")})


@once_or_often("controller")
def test_a_killed_run_goes_on_with_the_same_metrics_on_other_numbers_of_ranks(
    base_config: dict[str, Any],
    write_config: WriteConfig,
    spurline_chat_file: Path,
    warm_runs: WarmRuns,
    tmp_path: Path,
    victims: Sequence[Victim],
) -> None:
    config = config_to_kill(base_config, spurline_chat_file, 6 + 6 * len(victims))
    # Dropout is drawn by rank.
    del config["model"]["config_overrides"]
    layouts = [on_ranks(config, 1 + number % 3) for number in range(len(victims))]
    train_and_kill_each(warm_runs, write_config, layouts, victims)
    killed, whole = finish(on_ranks(config, 3)), finish(on_ranks(config | {"run_dir": str(tmp_path / "whole")}, 2))
    assert_same_to_rounding(killed, whole)
