"""Runs on several ranks: their metrics are those of one process, and the same again when they are repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_runs import METHODS, assert_close, ten_steps_of, train_in
from run_helpers import on_ranks

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("method", METHODS)
def test_ten_steps_have_the_metrics_of_one_process(method: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    config, train = ten_steps_of(method, request, tmp_path), train_in(tmp_path)
    assert_close(train(on_ranks(config), "ranks"), train(config, "local"))


def test_a_repeated_run_is_equal_bit_for_bit(base_config: dict[str, Any], tmp_path: Path) -> None:
    base_config["model"]["config_overrides"] = {"attention_dropout": 0.1}
    base_config["checkpoint"] = {}
    config, train = on_ranks(base_config, max_tokens_per_microbatch=64), train_in(tmp_path)
    first, second = train(config, "first"), train(config, "second")
    assert len(first) == 6
    assert first == second
