"""Runs on several ranks: their metrics are those of one process, and the same again when they are repeated."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import deterministic, on_ranks, read_metrics, write_pairs

from spurline import Run, load_config

pytestmark = pytest.mark.processes

Metrics = list[dict[str, Any]]

AROUND_ZERO = ("loss", "policy/kl_old", "mismatch/")
"""Metrics whose terms cancel in some of these runs, so that their roundings are left."""


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Metrics]:
    """Train a config; returns its metrics without times."""

    def train(config: dict[str, Any], name: str) -> Metrics:
        run_dir = tmp_path / name
        assert Run(load_config(config | {"run_dir": str(run_dir)})).train().status == "finished"
        return deterministic(read_metrics(run_dir))

    return train


@pytest.mark.parametrize("method", ["sft", "dpo", "rl"])
def test_ten_steps_have_the_metrics_of_one_process(
    method: str,
    request: pytest.FixtureRequest,
    base_config: dict[str, Any],
    spurline_chat_file: Path,
    tmp_path: Path,
    train: Callable[..., Metrics],
) -> None:
    config = _config(method, request, base_config, spurline_chat_file, tmp_path) | {"steps": 10, "checkpoint": {}}
    _assert_close(train(on_ranks(config), "ranks"), train(config, "local"))


def test_a_repeated_run_is_equal_bit_for_bit(
    base_config: dict[str, Any], spurline_chat_file: Path, tmp_path: Path, train: Callable[..., Metrics]
) -> None:
    base_config["model"]["config_overrides"] = {"attention_dropout": 0.1}
    base_config["checkpoint"] = {}
    config = on_ranks(base_config, max_tokens_per_microbatch=64)
    first, second = train(config, "first"), train(config, "second")
    assert len(first) == 6
    assert first == second


def _config(
    method: str, request: pytest.FixtureRequest, base_config: dict[str, Any], chat_file: Path, folder: Path
) -> dict[str, Any]:
    if method == "rl":
        return request.getfixturevalue("rl_config")
    if method == "sft":
        base_config["data"]["eval"] = str(chat_file)
        return base_config | {"evaluation": {"every_steps": 5}}
    base_config["data"] = {
        "train": str(write_pairs(folder / "pairs.jsonl", 30, seed=0)),
        "eval": str(write_pairs(folder / "held_out.jsonl", 11, seed=1)),
        "max_length": 64,
    }
    return base_config | {"source": "preference", "evaluation": {"every_steps": 5, "batch_size": 4}}


def _assert_close(left: Metrics, right: Metrics) -> None:
    assert len(left) == len(right)
    for one, other in zip(map(_trained, left), map(_trained, right), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float) and not name.endswith("lr"):
                roundings = 2e-6 if name.startswith(AROUND_ZERO) else 0.0
                assert math.isclose(one[name], value, rel_tol=1e-5, abs_tol=roundings), (other["step"], name)
            else:
                assert one[name] == value, (other["step"], name)


def _trained(line: dict[str, Any]) -> dict[str, Any]:
    """Without what differs by intent: rows are laid out for the number of ranks, and some of them are padding; an
    engine gets the weights where it does not share the model."""
    return {name: value for name, value in line.items() if not name.startswith(("packing/", "sync/"))}
