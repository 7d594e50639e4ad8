"""Runs on several ranks: their metrics are those of one process."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from every_run import SOAK
from run_helpers import Config, on_ranks, train, write_pairs

pytestmark = pytest.mark.processes

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tensor": {"backend": "megatron", "tensor": 2},
    "pipeline": {"backend": "megatron", "pipeline": 2, "max_tokens_per_microbatch": 256},
    "both-and-data": {"backend": "megatron", "ranks": 4, "tensor": 2},
}
Metrics = list[dict[str, Any]]

METHODS = ("sft", "dpo", "rl")
EVERY_RUN = {("sft", "fsdp"), ("sft", "pipeline"), ("dpo", "tensor"), ("rl", "tensor")}
"""Long runs have all. `test_async_ranks` has reinforcement learning with FSDP in every run."""
CASES = [
    pytest.param(*case, marks=() if case in EVERY_RUN else pytest.mark.slow)
    for case in product(METHODS, LAYOUTS)
    if SOAK or case in EVERY_RUN
]

AROUND_ZERO = ("loss", "policy/kl_old", "mismatch/")
"""Metrics whose terms cancel in some of these runs, so that their roundings are left."""


def ten_steps_of(method: str, request: pytest.FixtureRequest, folder: Path) -> Config:
    """A config of one of `METHODS`, with evaluations where it has some. folder: for the files of its data."""
    changes: Config = {"steps": 10, "checkpoint": {}}
    if method == "rl":
        return request.getfixturevalue("rl_config") | changes
    config = request.getfixturevalue("base_config")
    if method == "sft":
        config["data"]["eval"] = str(request.getfixturevalue("spurline_chat_file"))
        return config | changes | {"evaluation": {"every_steps": 5}}
    config["data"] = {
        "train": str(write_pairs(folder / "pairs.jsonl", 30, seed=0)),
        "eval": str(write_pairs(folder / "held_out.jsonl", 11, seed=1)),
        "max_length": 64,
    }
    return config | changes | {"source": "preference", "evaluation": {"every_steps": 5, "batch_size": 4}}


def assert_close(left: Metrics, right: Metrics) -> None:
    """Within 1e-5, but for roundings of what is 0 but for these."""
    assert len(left) == len(right)
    for one, other in zip(map(_trained, left), map(_trained, right), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float) and not name.endswith("lr"):
                roundings = 2e-6 if name.startswith(AROUND_ZERO) else 0.0
                assert math.isclose(one[name], value, rel_tol=1e-5, abs_tol=roundings), (other["step"], name)
            else:
                assert one[name] == value, (other["step"], name)


def _trained(line: dict[str, Any]) -> Config:
    """Without what differs by intent: rows are laid out for the number of ranks, and some of them are padding; an
    engine gets the weights where it does not share the model."""
    return {name: value for name, value in line.items() if not name.startswith(("packing/", "sync/"))}


@pytest.mark.parametrize(("method", "layout"), CASES)
def test_ten_steps_have_the_metrics_of_one_process(
    method: str, layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = ten_steps_of(method, request, tmp_path)
    ranks = train(on_ranks(config, **LAYOUTS[layout]), name="ranks")
    assert_close(ranks.without_times, train(config, name="local").without_times)
