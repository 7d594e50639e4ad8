"""Runs of Megatron: ten steps of every method have the metrics of one process, whatever the ranks divide."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from every_run import SOAK
from rank_runs import METHODS, assert_close, ten_steps_of, train_in
from run_helpers import on_ranks

pytestmark = pytest.mark.processes

LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "max_tokens_per_microbatch": 256},
    "both-and-data": {"ranks": 4, "tensor": 2},
}
EVERY_RUN = {("sft", "pipeline"), ("dpo", "tensor"), ("rl", "tensor")}
"""Each method once; long runs have all layouts."""
CASES = [
    pytest.param(*case, marks=() if case in EVERY_RUN else pytest.mark.slow)
    for case in product(METHODS, LAYOUTS)
    if SOAK or case in EVERY_RUN
]


@pytest.mark.parametrize(("method", "layout"), CASES)
def test_ten_steps_have_the_metrics_of_one_process(
    method: str, layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config, train = ten_steps_of(method, request, tmp_path), train_in(tmp_path)
    ranks = on_ranks(config, backend="megatron", **LAYOUTS[layout])
    assert_close(train(ranks, "ranks"), train(config, "local"))


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="the contract trains twice, too; SPURLINE_SOAK=1")
def test_a_repeated_run_is_equal_bit_for_bit(base_config: dict[str, Any], tmp_path: Path) -> None:
    config = on_ranks(base_config | {"checkpoint": {}}, backend="megatron", tensor=2, max_tokens_per_microbatch=64)
    train = train_in(tmp_path)
    first, second = train(config, "first"), train(config, "second")
    assert len(first) == 6
    assert first == second
